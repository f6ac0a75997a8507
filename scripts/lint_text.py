#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks of text that no compiler makes. Each prints `file:line: what is wrong`; the exit status says whether any did.

licence     every source and script names its licence in its first two lines
examples    C++ in README.md is, word for word, part of a file in examples/, which the tests build and run
links       relative links in Markdown lead to files that exist, and to headings that exist
paths       no file names a path of one machine or an address outside the list below
layers      nothing includes upwards (docs/design.md has the layers)
headers     every public header belongs to a library, which compiles it alone and installs it, and is in metrale.h
todo        a TODO names an issue
width       no line of a source is wider than 132 columns, but for one literal that cannot be broken
length      files past 500 lines are listed; past 800 they fail
"""
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = {".h", ".cpp", ".inl", ".inc", ".cu", ".cuh", ".mm"}
TEXT = SOURCES | {".md", ".txt", ".cmake", ".in", ".py", ".sh", ".json", ".yml", ""}
REPORT_LINES, MAX_LINES = 500, 800
MAX_COLUMNS = 132
# Folders that people and build services keep their checkouts in.
MACHINE_FOLDERS = "home|root|Users|mnt|opt|srv|media|scratch|builds?|work(?:spaces?)?"
ADDRESSES = ("apache.org", "localhost", "127.0.0.1", "example.com", "arxiv.org", "ietf.org", "unicode.org", "json.schemastore.org")

problems = 0


def report(file, line, text):
    global problems
    problems += 1
    print(f"{file}:{line}: {text}")


def project_files():
    listed = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, check=True,
                            capture_output=True).stdout.decode().split("\0")
    return sorted({Path(name) for name in listed if name and (ROOT / name).is_file()})


def check_licence(file, lines):
    named = file.suffix in SOURCES or file.suffix in {".cmake", ".py", ".sh", ".in"} or file.name in {"CMakeLists.txt", "Makefile"}
    named = named or (file.parts[0] in {"scripts", ".ci"} and file.suffix == "")
    if named and not any("SPDX-License-Identifier: Apache-2.0" in line for line in lines[:2]):
        report(file, 1, "the first line should be the licence: SPDX-License-Identifier: Apache-2.0")


def anchors(file):
    found, fenced = set(), False
    for line in (ROOT / file).read_text().splitlines():
        fenced ^= line.startswith("```")
        if not fenced and re.match(r"#+ ", line):
            title = re.sub(r"[^\w\- ]", "", line.lstrip("#").strip().lower())
            found.add(title.replace(" ", "-"))
    return found


def check_links(file, lines):
    fenced = False
    for number, line in enumerate(lines, 1):
        fenced ^= line.startswith("```")
        for target in [] if fenced else re.findall(r"\]\(([^)\s]+)\)", line):
            if "://" in target:
                continue
            path, _, anchor = target.partition("#")
            linked = file if not path else Path(*(file.parent / path).parts)
            if not (ROOT / linked).exists():
                report(file, number, f"link to {target}: no such file")
            elif anchor and linked.suffix == ".md" and anchor not in anchors(linked):
                report(file, number, f"link to {target}: no such heading")


def check_examples(file, lines, files):
    if file.name != "README.md" or len(file.parts) != 1:
        return
    programs = [" ".join((ROOT / f).read_text().split()) for f in files if f.parts[0] == "examples" and f.suffix == ".cpp"]
    text = "\n".join(lines)
    for block in re.finditer(r"^```cpp\n(.*?)^```", text, re.M | re.S):
        wanted = " ".join(block[1].split())
        if not any(wanted in program for program in programs):
            report(file, text[: block.start()].count("\n") + 1, "this example is in no file under examples/")


def check_paths(file, lines):
    for number, line in enumerate(lines, 1):
        for folder in re.findall(rf"(?:^|[\s\"'=(`])/({MACHINE_FOLDERS})/[\w.]", line):
            report(file, number, f"/{folder}/… looks like a path of one machine")
        for host in re.findall(r"https?://([\w.-]+)", line):
            if not host.endswith(ADDRESSES):
                report(file, number, f"address at {host}; name the thing, or add the host to the list in {Path(__file__).name}")


# A file under the first may include no project header under any of the second.
UPWARDS = [
    ("include/", ("core/", "backends/", "cache/", "weights/", "models/", "cli/", "bench/", "bridges/")),
    ("src/core/", ("cache/", "weights/", "models/", "cli/", "bench/", "conformance/")),
    ("src/backends/", ("cache/", "weights/", "models/", "cli/", "bench/", "conformance/")),
    ("src/cache/", ("backends/", "models/", "cli/", "bench/", "conformance/")),
    ("src/weights/", ("backends/", "models/", "cli/", "bench/", "conformance/")),
    ("src/models/", ("core/", "backends/", "cache/", "weights/", "cli/", "bench/", "conformance/")),
    ("kernels/", ("core/", "backends/", "cache/", "weights/", "models/", "cli/", "bench/", "conformance/")),
]
# How messages are worded and last releases logged, for every library.
SHARED_HELPERS = {"core/release_log.h", "core/text.h"}
DEVICE_HEADERS = re.compile(r"#\s*(?:include|import)\s*[<\"](?:cuda|cublas|nccl|Metal/|Foundation/)")


def check_layers(file, lines):
    name = file.as_posix()
    for number, line in enumerate(lines, 1):
        if name.startswith("include/") and DEVICE_HEADERS.match(line):
            report(file, number, "a public header reaches a driver's header")
        included = re.match(r"\s*#\s*include\s*\"([^\"]+)\"", line)
        for folder, above in UPWARDS if included else []:
            shared = included[1] in SHARED_HELPERS and folder == "src/models/"
            if name.startswith(folder) and included[1].startswith(above) and not shared:
                report(file, number, f"{folder} may not include {included[1]}, which is above or beside it")


def check_todo(file, lines):
    for number, line in enumerate(lines, 1):
        if re.search(r"\b(?:TODO|FIXME|XXX)\b(?!\(#\d+\))", line) and file.name != Path(__file__).name:
            report(file, number, "a TODO names its issue: TODO(#12)")


def check_width(file, lines):
    if file.suffix not in SOURCES | {".cmake", ".py", ".sh"} and file.name != "CMakeLists.txt":
        return
    for number, line in enumerate(lines, 1):
        long_literal = re.search(r"""R"\w*\(|"[^"]{80,}"|'[^']{80,}'""", line)
        if len(line) > MAX_COLUMNS and not long_literal:
            report(file, number, f"{len(line)} columns; {MAX_COLUMNS} are the most, comments included")


def check_headers(files):
    lists = "".join((ROOT / file).read_text() for file in files if file.name == "CMakeLists.txt")
    everything = (ROOT / "include/metrale/metrale.h").read_text()
    owned = set(re.findall(r"\bmetrale/[\w/]+\.h\b", lists))
    for file in files:
        if file.parts[0] == "include" and file.suffix == ".h" and file.relative_to("include").as_posix() not in owned:
            report(file, 1, "no library lists this header under HEADERS, so it is neither installed nor compiled alone")
        if file.parts[0] == "include" and file.suffix == ".h" and file.name != "metrale.h":
            if f'"{file.relative_to("include").as_posix()}"' not in everything:
                report(file, 1, "metrale/metrale.h, which has all of the public headers, lacks this one")


def main():
    files = project_files()
    long_files = []
    for file in files:
        data = file.as_posix().startswith("tests/data/") and file.suffix != ".md"
        if file.suffix not in TEXT or data or file.name == "LICENSE":
            continue
        try:
            lines = (ROOT / file).read_text().splitlines()
        except UnicodeDecodeError:
            continue
        check_licence(file, lines)
        check_paths(file, lines)
        check_todo(file, lines)
        check_width(file, lines)
        if file.suffix == ".md":
            check_links(file, lines)
            check_examples(file, lines, files)
        if file.suffix in SOURCES:
            check_layers(file, lines)
            if len(lines) > REPORT_LINES:
                long_files.append((len(lines), file))
    check_headers(files)
    for count, file in sorted(long_files, reverse=True):
        print(f"{file}: {count} lines; is there a noun to split by?")
        if count > MAX_LINES:
            report(file, MAX_LINES, f"longer than {MAX_LINES} lines")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
