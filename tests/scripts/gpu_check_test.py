#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""scripts/gpu_check.py over programs that fail, hang and lie: it goes on, ends what hangs, and writes what happened."""
import json
import os
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent

METGPU = """#!/bin/sh
case $1 in
  info) echo "in $PWD/here" ;;
  kernels) echo '{"resolved": 4, "unresolved": 1}'; exit 1 ;;
  check) [ "$METRALE_REQUIRE_BACKENDS" = cuda ] || exit 3; echo '{"passed": 7}' >"$5"; echo '7 passed, 0 failed, 0 skipped' ;;
  bench) echo 'no JSON' >"$3"; exit 1 ;;
esac
"""
# Deaf to polite requests, with a child of its own.
HANGING = """#!/bin/sh
trap '' TERM
sleep 600 &
echo $! >"$(dirname "$0")/child"
wait
sleep 600
"""


class GpuCheckTest(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.programs = Path(self.folder.name) / "programs"
        self.out = Path(self.folder.name) / "out"
        self.programs.mkdir()
        self.program("metgpu", METGPU)

    def tearDown(self):
        self.folder.cleanup()

    def program(self, name, text):
        (self.programs / name).write_text(text)
        (self.programs / name).chmod(0o755)

    def run_check(self, *arguments):
        done = subprocess.run([sys.executable, ROOT / "scripts/gpu_check.py", "--programs", self.programs, "--out", self.out,
                               "--name", "report", *arguments], capture_output=True, text=True, timeout=120, check=False)
        path = self.out / "report.json"
        report = json.loads(path.read_text()) if path.exists() else None
        return done, report, {step["name"]: step for step in report["steps"]} if report else {}

    def test_a_failed_step_keeps_no_other_from_running(self):
        done, report, steps = self.run_check("--commit", "abc")
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertTrue(report["complete"])
        self.assertEqual(report["commit"], "abc")
        self.assertEqual([(step["name"], step["ok"], step["exit_code"]) for step in report["steps"]],
                         [("info", True, 0), ("kernels", False, 1), ("check", True, 0), ("bench", False, 1)])
        self.assertEqual(steps["kernels"]["summary"], "4 resolved, 1 unresolved")
        self.assertEqual(steps["check"]["summary"], "7 passed, 0 failed, 0 skipped")
        self.assertEqual(steps["check"]["result"], {"passed": 7})
        self.assertIsNone(steps["bench"]["result"])

    def test_what_hangs_is_ended_with_its_children(self):
        self.program("deaf_test", HANGING)
        start = time.monotonic()
        done, _, steps = self.run_check("--only", "deaf*,info", "--step-limit", "1")
        self.assertLess(time.monotonic() - start, 60)
        self.assertEqual(done.returncode, 1)
        self.assertTrue(steps["deaf_test"]["timed_out"])
        self.assertFalse(steps["deaf_test"]["ok"])
        self.assertTrue(steps["info"]["ok"])
        child = int((self.programs / "child").read_text())
        with self.assertRaises(ProcessLookupError):
            for _ in range(50):
                os.kill(child, 0)
                time.sleep(0.1)

    def test_a_program_that_is_not_there_is_a_failed_step(self):
        done, _, steps = self.run_check("--sanitize", "--sanitizer", str(self.programs / "absent"), "--only", "memcheck-*")
        self.assertEqual(done.returncode, 1)
        self.assertIsNone(steps["memcheck-check"]["exit_code"])
        self.assertIn("absent", steps["memcheck-check"]["output_tail"])

    def test_the_report_has_no_path_of_this_machine(self):
        _, report, steps = self.run_check()
        self.assertEqual(steps["info"]["output_tail"], "in " + "here\n")
        self.assertNotIn(tempfile.gettempdir() + "/metrale-gpu-check", json.dumps(report))

    def test_an_unknown_step_is_wrong_use(self):
        done, report, _ = self.run_check("--only", "nothing")
        self.assertEqual(done.returncode, 2)
        self.assertIsNone(report)


if __name__ == "__main__":
    unittest.main()
