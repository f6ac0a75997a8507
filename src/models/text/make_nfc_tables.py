#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes nfc_tables.inc from Python's own Unicode data: python3 make_nfc_tables.py > nfc_tables.inc"""
import sys
import unicodedata

HANGUL = range(0xAC00, 0xD7A4)


def rows(items, width):
    line = ""
    for item in items:
        if len(line) + len(item) + 1 > width:
            print(line)
            line = ""
        line += (" " if line else "  ") + item
    print(line)


decompositions = []
classes = []
for cp in range(sys.maxunicode + 1):
    char = chr(cp)
    mapping = unicodedata.decomposition(char)
    if mapping and not mapping.startswith("<") and cp not in HANGUL:
        parts = [int(part, 16) for part in mapping.split()]
        first, second = parts[0], parts[1] if len(parts) > 1 else 0
        composes = second != 0 and unicodedata.normalize("NFC", chr(first) + chr(second)) == char
        decompositions.append((cp, first, second, composes))
    ccc = unicodedata.combining(char)
    if ccc:
        if classes and classes[-1][1] == cp - 1 and classes[-1][2] == ccc:
            classes[-1][1] = cp
        else:
            classes.append([cp, cp, ccc])

print("// SPDX-License-Identifier: Apache-2.0")
print(f"// Made by make_nfc_tables.py from Unicode {unicodedata.unidata_version}.")
print("// {code point, first, second or 0, whether the two compose again}")
print("constexpr Decomposition kDecompositions[] = {")
rows((f"{{0x{c:X},0x{a:X},0x{b:X},{int(k)}}}," for c, a, b, k in decompositions), 132)
print("};")
print("// {first, last, canonical combining class}")
print("constexpr ClassRange kClasses[] = {")
rows((f"{{0x{a:X},0x{b:X},{k}}}," for a, b, k in classes), 132)
print("};")
