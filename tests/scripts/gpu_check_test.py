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

    def test_a_program_that_ran_nothing_has_failed(self):
        nothing = {"testsuites": [{"name": "A", "testsuite": [{"name": "b", "status": "RUN", "result": "SKIPPED"}]}]}
        self.program("idle_test", f"""#!/bin/sh
            case $1 in --gtest_output=json:*) echo '{json.dumps(nothing)}' >"${{1#*json:}}" ;; esac""")
        self.program("metgpu", METGPU.replace("7 passed", "0 passed"))
        done, _, steps = self.run_check("--only", "idle_test,check")
        self.assertEqual(done.returncode, 1)
        self.assertEqual(steps["idle_test"]["exit_code"], 0)
        self.assertEqual((steps["idle_test"]["ok"], steps["idle_test"]["problem"]), (False, "no test ran"))
        self.assertIn("skipped: A.b", steps["idle_test"]["summary"])
        self.assertEqual((steps["check"]["ok"], steps["check"]["problem"]), (False, "no case ran"))

    def test_a_figure_that_bench_leaves_out_is_missed(self):
        rows = [{"suite": "gemv", "name": "1 row x 4096x4096 bf16", "figure": 9.0, "minimum": 10, "goal": 9, "status": "goal"}]
        self.program("metgpu", f"""#!/bin/sh
            echo '{json.dumps({"rows": rows})}' >"$3" """)
        _, _, steps = self.run_check("--only", "bench", "--bench-arguments=--suite gemv")
        self.assertTrue(steps["bench"]["ok"], steps["bench"]["problem"])
        done, _, steps = self.run_check("--only", "bench", "--bench-arguments=--suite gemv,launch")
        self.assertEqual((done.returncode, steps["bench"]["ok"]), (1, False))
        self.assertIn("launch of 8 arguments", steps["bench"]["problem"])

    def test_a_sanitizer_is_believed_only_with_its_summary_and_with_tests_that_ran(self):
        self.program("a_parity_test", "#!/bin/sh\necho \"[  PASSED  ] ${METRALE_TEST_FEW:-2} tests.\"\n")
        self.program("sanitizer", """#!/bin/sh
            tool=$2
            while [ "${1#/}" = "$1" ]; do shift; done
            "$@"
            case $tool in
              memcheck) echo '========= ERROR SUMMARY: 0 errors' ;;
              racecheck) echo '========= Error: Race reported between Write access at f(int)+0x10 in a.cuh:3'
                echo '========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)'; exit 86 ;;
              initcheck) ;;
            esac""")
        done, _, steps = self.run_check("--sanitize", "--sanitizer", str(self.programs / "sanitizer"), "--only", "*check-a_*")
        self.assertEqual(done.returncode, 1)
        self.assertEqual(list(steps), [f"{tool}-a_parity_test" for tool in ("memcheck", "racecheck", "initcheck", "synccheck")])
        self.assertTrue(steps["memcheck-a_parity_test"]["ok"])
        self.assertEqual(steps["memcheck-a_parity_test"]["summary"], "ERROR SUMMARY: 0 errors; 2 passed")
        self.assertEqual(steps["racecheck-a_parity_test"]["problem"], "exit 86, it found something")
        self.assertEqual(len(steps["racecheck-a_parity_test"]["findings"]), 1)
        self.assertIn("1 x Error: Race reported", done.stdout)
        self.assertEqual(steps["initcheck-a_parity_test"]["problem"], "no summary of compute-sanitizer")
        self.assertIn("racecheck-a_parity_test: METRALE_TEST_FEW", done.stdout)
        self.assertEqual(steps["initcheck-a_parity_test"]["environment"]["METRALE_TEST_NO_BATCHED_COPIES"], "1")

    def test_peers_are_compared_with_figures_of_the_same_run(self):
        rows = [{"suite": "decode", "name": name, "figure": figure, "status": "-"}
                for name, figure in (("read-only sweep", 1), ("llama-8b, bf16, context 512", 260.0),
                                     ("hybrid-4b, bf16: bytes a token", 1), ("smollm2-135m, bf16, context 512", 3000.0))]
        self.program("metgpu", f"""#!/bin/sh
            echo '{json.dumps({"rows": rows})}' >"$3" """)
        self.program("python", """#!/bin/sh
            shape=${2%:*} mode=${2#*:}
            [ $mode = max-autotune ] || { echo '{"what": "'$2'", "failed": "not done after 1 s"}'; exit 1; }
            echo a warning
            echo '{"what": "transformers '$shape'", "mode": "'$mode'", "context": 512, "tokens_per_second": 500.0}'""")
        done, report, steps = self.run_check("--peers", "--python", str(self.programs / "python"), "--only", "bench,peer-torch-*",
                                             "--bench-arguments=--suite decode")
        self.assertEqual(done.returncode, 1)
        self.assertEqual(steps["peer-torch-llama-8b-max-autotune"]["summary"], "500.0 tokens/s")
        self.assertIn("not done after 1 s", steps["peer-torch-llama-8b-reduce-overhead"]["summary"])
        self.assertEqual([(row["ours"], row["peer"], row["ratio"]) for row in report["ratios"]], [(3000, 500, 6), (260, 500, 0.52)])
        self.assertIn("transformers llama-8b, max-autotune, tokens/s", done.stdout)
        self.assertIn("compute-sanitizer: --sanitize was not given", done.stdout)

    def test_ending_it_ends_the_steps(self):
        self.program("deaf_test", HANGING)
        running = subprocess.Popen([sys.executable, ROOT / "scripts/gpu_check.py", "--programs", self.programs, "--out", self.out,
                                    "--only", "deaf_test"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for _ in range(100):
            if (self.programs / "child").exists() and (self.programs / "child").read_text():
                break
            time.sleep(0.1)
        running.terminate()
        self.assertEqual(running.wait(60), 1)
        child = int((self.programs / "child").read_text())
        with self.assertRaises(ProcessLookupError):
            for _ in range(50):
                os.kill(child, 0)
                time.sleep(0.1)

    def test_an_unknown_step_is_wrong_use(self):
        done, report, _ = self.run_check("--only", "nothing")
        self.assertEqual(done.returncode, 2)
        self.assertIsNone(report)


if __name__ == "__main__":
    unittest.main()
