// SPDX-License-Identifier: Apache-2.0
//
// Any sequence of reference changes and table operations, against a model of a few lines.
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <map>
#include <vector>

#include "metrale/kv_cache.h"
#include "unit/core/two_backends.h"

namespace metrale {
namespace {

struct Model {
  std::vector<std::uint32_t> refs;
  std::vector<std::uint32_t> free;  // a stack
};

Model fresh(std::uint32_t num_blocks) {
  Model model{std::vector<std::uint32_t>(num_blocks, 0), {}};
  for (std::uint32_t i = num_blocks; i-- > 0;) model.free.push_back(i);
  return model;
}

void expect_same(const PagedKvCache& cache, const Model& model) {
  RC_ASSERT(cache.num_free_blocks() == model.free.size());
  for (std::uint32_t i = 0; i < model.refs.size(); ++i) RC_ASSERT(cache.ref_count(i) == model.refs[i]);
}

RC_GTEST_PROP(KvCacheProperty, ReferencesFollowTheModel, ()) {
  static const auto backend = test::make_mock();
  const auto num_blocks = *rc::gen::inRange<std::uint32_t>(1, 9);
  const bool trace = *rc::gen::arbitrary<bool>();
  const auto cache = std::move(*PagedKvCache::create(*backend, KvLayout::uniform(1, 1, 4, DType::f8_e4m3, 1), num_blocks,
                                                     {.poison = false, .trace = trace}));
  Model model = fresh(num_blocks);
  const auto steps = *rc::gen::container<std::vector<std::pair<int, std::uint32_t>>>(
      rc::gen::pair(rc::gen::inRange(0, 4), rc::gen::inRange<std::uint32_t>(0, num_blocks + 2)));
  for (const auto& [what, block] : steps) {
    switch (what) {
      case 0: {
        const Result<std::uint32_t> got = cache->alloc_block();
        RC_ASSERT(got.has_value() == !model.free.empty());
        if (got) {
          RC_ASSERT(*got == model.free.back());
          model.free.pop_back();
          model.refs[*got] = 1;
        } else {
          RC_ASSERT(got.error().code() == Errc::out_of_memory);
        }
        break;
      }
      case 1: {
        const Result<> added = cache->add_ref(block);
        const bool possible = block < num_blocks && model.refs[block] > 0;
        RC_ASSERT(added.has_value() == possible);
        if (possible) ++model.refs[block];
        break;
      }
      default: {
        const Result<> dropped = cache->drop_ref(block);
        const bool possible = block < num_blocks && model.refs[block] > 0;
        RC_ASSERT(dropped.has_value() == possible);
        if (!possible) {
          RC_ASSERT(dropped.error().code() == (block < num_blocks ? Errc::invalid_argument : Errc::out_of_range));
        } else if (--model.refs[block] == 0) {
          model.free.push_back(block);
        }
      }
    }
    expect_same(*cache, model);
  }
  RC_ASSERT(cache->release(*backend).has_value());
  RC_ASSERT(backend->live_alloc_count() == 0u);
}

RC_GTEST_PROP(KvCacheProperty, TablesNeverShareABlockUnlessAskedAndGiveAllBack, ()) {
  static const auto backend = test::make_mock();
  const auto block_size = *rc::gen::inRange<std::uint32_t>(1, 6);
  const auto num_blocks = *rc::gen::inRange<std::uint32_t>(1, 20);
  const auto cache = std::move(*PagedKvCache::create(*backend, KvLayout::uniform(1, 1, 4, DType::f8_e4m3, block_size), num_blocks,
                                                     {.poison = false, .trace = false}));
  {
    std::vector<BlockTable> tables;
    const auto steps = *rc::gen::container<std::vector<std::tuple<int, std::size_t, std::uint64_t>>>(
        rc::gen::tuple(rc::gen::inRange(0, 5), rc::gen::inRange<std::size_t>(0, 4), rc::gen::inRange<std::uint64_t>(0, 40)));
    for (const auto& [what, which, tokens] : steps) {
      if (what == 0 || tables.empty()) {
        if (tables.size() < 4) tables.emplace_back(*cache);
        continue;
      }
      BlockTable& table = tables[which % tables.size()];
      const std::size_t before = table.blocks().size();
      const std::size_t needed = (tokens + block_size - 1) / block_size;
      if (what == 1) {
        const std::uint32_t available = cache->num_free_blocks();
        const bool fits = needed <= before || needed - before <= available;
        RC_ASSERT(table.reserve(tokens).has_value() == fits);
        RC_ASSERT(table.blocks().size() == (fits ? std::max(before, needed) : before));
      } else if (what == 2) {
        RC_ASSERT(table.truncate(tokens).has_value());
        RC_ASSERT(table.blocks().size() == std::min(before, needed));
      } else if (what == 3 && tables.size() < 4) {
        BlockTable shared = std::move(*table.share_prefix(tokens));
        RC_ASSERT(shared.blocks().size() == std::min<std::size_t>(before, tokens / block_size));
        tables.push_back(std::move(shared));
      } else if (what == 4) {
        tables.erase(tables.begin() + static_cast<std::ptrdiff_t>(which % tables.size()));
      }
      // Every reference is held by exactly one table.
      std::map<std::int32_t, std::uint32_t> holders;
      for (const BlockTable& t : tables) {
        for (const std::int32_t block : t.blocks()) ++holders[block];
      }
      for (std::uint32_t i = 0; i < num_blocks; ++i) {
        const auto it = holders.find(static_cast<std::int32_t>(i));
        RC_ASSERT(cache->ref_count(i) == (it == holders.end() ? 0 : it->second));
      }
      RC_ASSERT(cache->num_free_blocks() == num_blocks - holders.size());
    }
  }
  RC_ASSERT(cache->num_free_blocks() == num_blocks);
}

RC_GTEST_PROP(KvCacheProperty, ComputedBlocksFitAndOneMoreDoesNot, ()) {
  KvLayout layout;
  layout.block_size = *rc::gen::inRange<std::uint32_t>(1, 300);
  const auto side = [] {
    return KvSide{*rc::gen::inRange<std::uint32_t>(1, 100), *rc::gen::inRange<std::uint32_t>(1, 600),
                  *rc::gen::element(DType::bf16, DType::f32, DType::f8_e4m3)};
  };
  const auto num_layers = *rc::gen::inRange(1, 10);
  for (int i = 0; i < num_layers; ++i) layout.layers.push_back({side(), side()});
  const auto bytes = *rc::gen::inRange<std::uint64_t>(0, std::uint64_t{1} << 40);
  const Result<std::uint32_t> blocks = compute_num_blocks(bytes, layout);
  RC_ASSERT(blocks.has_value() == (bytes >= layout.bytes_per_block()));
  if (blocks) {
    RC_ASSERT(*blocks * layout.bytes_per_block() <= bytes);
    RC_ASSERT((*blocks + std::uint64_t{1}) * layout.bytes_per_block() > bytes);
  }
}

}  // namespace
}  // namespace metrale
