// SPDX-License-Identifier: Apache-2.0
//
// What metgpu promises beyond the library: exit codes, errors of one line, what goes to which stream, bounded input.
#include <sys/stat.h>

#include <nlohmann/json.hpp>

#include <tuple>
#include <vector>

#include "run_tool.h"

namespace metrale::test {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;
using ::testing::Not;

const std::string kModel = METRALE_TEST_DATA "/kjv-llama-2m";
const std::string kIds = "5 6 7 8 9 10 11 12 13 14 15 16";

/// `count` words, each a token or more.
std::string words(std::size_t count) {
  std::string text;
  while (count-- > 0) text += "word ";
  return text;
}

// ---- wrong use ----

class WrongUse : public ::testing::TestWithParam<std::tuple<const char*, const char*>> {};

TEST_P(WrongUse, ExitsWithTwoAndALineThatNamesIt) {
  const auto& [arguments, part] = GetParam();
  expect_refusal(run_tool(arguments), 2, {"metgpu: ", part});
}

INSTANTIATE_TEST_SUITE_P(
    Options, WrongUse,
    ::testing::Values(
        std::tuple("generate --model m --prompt p --temperature -1", "temperature -1"),
        std::tuple("generate --model m --prompt p --temperature nan", "temperature nan"),
        std::tuple("generate --model m --prompt p --top-p 0", "top_p 0"),
        std::tuple("generate --model m --prompt p --top-p 2", "top_p 2"),
        std::tuple("generate --model m --prompt p --seed -1", "--seed: '-1'"),
        std::tuple("generate --model m --prompt p --seed 010", "--seed: '010'"),
        std::tuple("generate --model m --prompt p --seed 18446744073709551616", "--seed: '18446744073709551616'"),
        std::tuple("generate --model m --prompt p --max-tokens -1", "--max-tokens: '-1'"),
        std::tuple("generate --model m --prompt p --top-k 4294967296", "--top-k: '4294967296'"),
        std::tuple("generate --model m --prompt p --context -1", "--context: '-1'"),
        std::tuple("generate --model m --prompt p --tensor-parallel 0", "--tensor-parallel: '0' is no whole number from 1 to 64"),
        std::tuple("generate --model m --prompt p --tensor-parallel 65", "--tensor-parallel: '65'"),
        std::tuple("generate --model m --prompt p --backend nope", "'nope' is none of auto, "),
        std::tuple("generate --model m --prompt p --backend mock", "the mock backend computes nothing; take one of auto, "),
        std::tuple("generate --model '' --prompt p", "--model: is empty"), std::tuple("generate --model m --promt p", "--promt"),
        std::tuple("eval --model m --text t --backend mock", "computes nothing"),
        std::tuple("eval --model m --text t --window 1", "--window: '1' is no whole number from 2"),
        std::tuple("eval --model m --text t --ids i", "--ids"), std::tuple("kernels --backend nope", "'nope' is none of auto"),
        std::tuple("report --backend nope", "'nope' is none of auto"), std::tuple("report --context -1", "--context: '-1'"),
        std::tuple("report --model ''", "--model: is empty"), std::tuple("check --backend nope", "'nope' is none of"),
        std::tuple("check --json ''", "--json: is empty"), std::tuple("bench --suite lunch", "'lunch' is none of launch, alloc"),
        std::tuple("bench --rounds 0", "--rounds: '0'"), std::tuple("frobnicate", "there is no command 'frobnicate'"),
        std::tuple("info frobnicate", "frobnicate"), std::tuple("", "subcommand is required")));

// ---- the streams ----

TEST(Metgpu, HelpAndVersionThatCannotBeWrittenFail) {
  for (const char* arguments : {"--help", "--version", "generate --help", "info", "info --json", "kernels"}) {
    SCOPED_TRACE(arguments);
    expect_refusal(run_tool(std::string(arguments) + " >/dev/full"), 1, {"metgpu: io: "});
  }
}

TEST(Metgpu, CheckPutsOnlyJsonOnStandardOutput) {
  const ToolRun run = run_tool("check --filter '^Memset' --verbose --json -");
  EXPECT_EQ(run.exit, 0) << run.err;
  const json results = json::parse(run.out, nullptr, false);
  ASSERT_FALSE(results.is_discarded()) << run.out;
  EXPECT_GT(results["passed"], 0);
  EXPECT_THAT(run.err, HasSubstr("passed   Memset"));
  EXPECT_THAT(run.err, HasSubstr(" passed, 0 failed, "));
}

TEST(Metgpu, ErrorsAreOneLineWhateverTheNamesHold) {
  const ToolRun run = run_tool("generate --prompt p --model \"$(printf 'no\\nsuch\\033[31m\\302\\233model')\"");
  expect_refusal(run, 1, {"no\\x0asuch\\x1b[31m\\xc2\\x9bmodel"});
  const ToolRun use = run_tool("kernels --backend \"$(printf 'a\\nb')\"");
  expect_refusal(use, 2, {"a\\x0ab"});
}

// ---- texts from outside ----

TEST(Metgpu, EvalRefusesPipesDevicesAndFolders) {
  const TempFolder scratch;
  const std::string pipe = (scratch / "pipe").string();
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  for (const std::string option : {"--text ", "--ids "}) {
    for (const std::string& path : {pipe, std::string("/dev/zero"), scratch.path().string()}) {
      SCOPED_TRACE(option + path);
      expect_refusal(run_tool("eval --model " + kModel + " " + option + path), 1, {"invalid_argument", path, "not a file"});
    }
  }
  expect_refusal(run_tool("eval --model " + kModel + " --text " + pipe + ".not"), 1, {"not_found", pipe + ".not"});
}

TEST(Metgpu, EvalRefusesATextBeyondTheLimit) {
  const TempFolder scratch;
  const std::string path = (scratch / "long").string();
  write_file(path, "");
  std::filesystem::resize_file(path, (16U << 20) + 1);
  expect_refusal(run_tool("eval --model " + kModel + " --text " + path), 1, {"invalid_argument", path, "16 MiB"});
}

TEST(Metgpu, APromptWithoutEndIsRefusedAtTheLimit) {
  const std::string generate = "generate --model " + kModel + " --prompt - ";
  expect_refusal(run_tool(generate + "</dev/zero"), 1, {"invalid_argument", "standard input", "16 MiB"});
}

TEST(Metgpu, StandardInputThatCannotBeReadSaysSo) {
  const std::string generate = "generate --model " + kModel + " --prompt - ";
  expect_refusal(run_tool(generate + "</tmp"), 1, {"metgpu: io: standard input: Is a directory"});
  expect_refusal(run_tool(generate + "<&-"), 1, {"metgpu: io: standard input: Bad file descriptor"});
  expect_refusal(run_tool(generate + "</dev/null"), 1, {"the prompt is empty"});
}

TEST(Metgpu, APromptOnStandardInputIsContinued) {
  const ToolRun run = run_tool("generate --model " + kModel + " --prompt - --max-tokens 4 --json", "printf 'In the beginning' |");
  ASSERT_EQ(run.exit, 0) << run.err;
  EXPECT_EQ(json::parse(run.out)["ids"].size(), 4U);
}

// ---- generate, eval, report ----

TEST(Metgpu, EvalPrintsJsonForAModelWhosePathIsNoUtf8) {
  const TempFolder scratch;
  const std::string ids = (scratch / "ids").string();
  write_file(ids, kIds);
  const std::filesystem::path link = scratch / "m\xff";
  std::filesystem::create_symlink(std::filesystem::absolute(kModel), link);
  const ToolRun run = run_tool("eval --json --model '" + link.string() + "' --ids " + ids);
  ASSERT_EQ(run.exit, 0) << run.err;
  const json report = json::parse(run.out);
  EXPECT_EQ(report["model"], (scratch / "m").string() + "\xEF\xBF\xBD");
  EXPECT_EQ(report["tokens"], 11);
}

// ---- a model over several devices ----

TEST(Metgpu, TwoRanksOnTheHostContinueAPromptAsOneDoes) {
  const std::string generate = "generate --backend host --model " + kModel + " --prompt 'In the beginning' --max-tokens 24 --json";
  const ToolRun one = run_tool(generate);
  const ToolRun two = run_tool(generate + " --tensor-parallel 2 --stats");
  EXPECT_EQ(two.exit, 0) << two.err;
  const json whole = json::parse(one.out, nullptr, false);
  const json parts = json::parse(two.out, nullptr, false);
  ASSERT_FALSE(whole.is_discarded() || parts.is_discarded()) << one.err << two.err;
  EXPECT_EQ(parts["ids"], whole["ids"]);
  EXPECT_EQ(parts["ids"].size(), 24U);
  EXPECT_EQ(parts["ranks"], 2);
  EXPECT_EQ(parts["unload"]["clean"], true);
  EXPECT_THAT(two.err, HasSubstr("unload "));
}

TEST(Metgpu, ARankNumberThatDoesNotDivideTheModelIsRefused) {
  expect_refusal(run_tool("generate --backend host --model " + kModel + " --prompt p --tensor-parallel 4"), 1,
                 {"unsupported: 4 ranks do not divide the model's 6 attention heads"});
}

TEST(Metgpu, ProcessesThatWereStartedTogetherSayWhatTheyLack) {
  const std::string generate = "generate --backend host --model " + kModel + " --prompt p --tensor-parallel 2";
  const std::string start = "RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500";
  expect_refusal(run_tool(generate, start), 1, {"unsupported: processes meet by NCCL"});
  expect_refusal(run_tool(generate, "RANK=0 WORLD_SIZE=3"), 1, {"--tensor-parallel 2 in one of 3 processes started by torchrun"});
  expect_refusal(run_tool(generate, "RANK=0"), 1, {"WORLD_SIZE is not set"});
}

TEST(Metgpu, ContextCountsWhatTheModelReads) {
  const std::string generate = "generate --json --model " + kModel + " --prompt 'In the beginning' --context ";
  const json all = json::parse(run_tool(generate + "0 --max-tokens 1").out);
  const std::size_t prompt = all["prompt_ids"].size();
  const json full = json::parse(run_tool(generate + std::to_string(prompt + 2)).out);
  EXPECT_EQ(full["stop"], "context_full");
  EXPECT_EQ(full["ids"].size(), 3U) << "the last one is never read";
  EXPECT_THAT(run_tool("generate --help").out, HasSubstr("the answer without its last"));
}

TEST(Metgpu, AWindowBeyondTheContextIsRefusedByName) {
  const TempFolder scratch;
  const std::string text = (scratch / "text").string();
  write_file(text, words(4200));
  expect_refusal(run_tool("eval --model " + kModel + " --text " + text + " --window 5000"), 1,
                 {"out_of_range", "4096", "--window 5000"});
  // A text shorter than the window is one window.
  const std::string ids = (scratch / "ids").string();
  write_file(ids, kIds);
  const ToolRun run = run_tool("eval --json --model " + kModel + " --ids " + ids + " --window 5000");
  EXPECT_EQ(run.exit, 0) << run.err;
}

TEST(Metgpu, AMockThatComputesNothingLoadsNoModel) {
  expect_refusal(run_tool("report --backend mock --model " + kModel), 1, {"unsupported", "the mock backend computes nothing"});
}

TEST(Metgpu, BenchMeasuresTheHostByItself) {
  const TempFolder folder;
  const std::string json_path = (folder / "report.json").string();
  const std::string page_path = (folder / "report.html").string();
  const ToolRun run = run_tool("bench --backend host --suite launch,copy --json '" + json_path + "' --html '" + page_path + "'");
  EXPECT_EQ(run.exit, 0) << run.err;
  EXPECT_THAT(run.out, HasSubstr("launch of 8 arguments, host cost"));
  const json report = json::parse(read_all(json_path));
  EXPECT_EQ(report["command"], "metgpu bench --backend host --suite launch,copy");
  EXPECT_EQ(report["failures"], json::array());
  EXPECT_THAT(read_all(page_path), HasSubstr("</html>"));
}

TEST(Metgpu, BenchSaysInOneLineWhyItCannotRun) {
  const ToolRun run = run_tool("bench --suite launch --json /dev/null", "CUDA_VISIBLE_DEVICES=");
  expect_refusal(run, 1, {"metgpu: unsupported: "});
  EXPECT_EQ(run.out, "");
}

TEST(Metgpu, BenchNamesTheFileItCannotWriteBeforeItMeasures) {
  expect_refusal(run_tool("bench --backend host --json /nonexistent/report.json"), 1,
                 {"metgpu: io: /nonexistent/report.json: No such file or directory"});
}

TEST(Metgpu, ReportHasItsArraysAlsoWhenNothingIsHeld) {
  const ToolRun run = run_tool("report --backend mock --json");
  ASSERT_EQ(run.exit, 0) << run.err;
  const json report = json::parse(run.out);
  for (const char* part : {"explained", "owners", "sites"}) EXPECT_TRUE(report[part].is_array()) << part << run.out;
  EXPECT_FALSE(report.contains("unload")) << "there was no model";
  const ToolRun loaded = run_tool("report --json --model " + kModel);
  ASSERT_EQ(loaded.exit, 0) << loaded.err;
  const json with_model = json::parse(loaded.out);
  EXPECT_GT(with_model["unload"]["lines"].size(), 0U);
  EXPECT_EQ(with_model["unload"]["balance_bytes"], 0);
}

}  // namespace
}  // namespace metrale::test
