// SPDX-License-Identifier: Apache-2.0
#include "models/text/bpe.h"

#include <algorithm>

namespace metrale::text {
namespace {

constexpr std::uint32_t kNone = UINT32_MAX;
// Up to this length scanning for the best pair beats keeping a heap.
constexpr std::size_t kShortWord = 24;

}  // namespace

Bpe::Bpe(const std::array<TokenId, 256>& byte_ids, const std::vector<Merge>& merges, std::size_t vocab_size, TokenId unknown)
    : byte_ids_(byte_ids), unknown_(unknown), first_(vocab_size + 1, 0), entries_(merges.size()) {
  for (const Merge& merge : merges) ++first_[static_cast<std::size_t>(merge.left) + 1];
  for (std::size_t i = 0; i < vocab_size; ++i) first_[i + 1] += first_[i];
  std::vector<std::uint32_t> fill(first_.begin(), first_.end() - 1);
  for (std::uint32_t rank = 0; rank < merges.size(); ++rank) {
    const Merge& merge = merges[rank];
    entries_[fill[static_cast<std::size_t>(merge.left)]++] = {merge.right, merge.result, rank};
  }
  for (std::size_t i = 0; i < vocab_size; ++i) {
    std::sort(entries_.begin() + first_[i], entries_.begin() + first_[i + 1],
              [](const Entry& a, const Entry& b) { return a.right < b.right; });
  }
}

const Bpe::Entry* Bpe::find(TokenId left, TokenId right) const noexcept {
  const Entry* low = entries_.data() + first_[static_cast<std::size_t>(left)];
  const Entry* high = entries_.data() + first_[static_cast<std::size_t>(left) + 1];
  const Entry* it = std::lower_bound(low, high, right, [](const Entry& entry, TokenId value) { return entry.right < value; });
  return it != high && it->right == right ? it : nullptr;
}

void Bpe::encode(std::string_view word, std::vector<TokenId>& out, Scratch& scratch) const {
  scratch.symbols.clear();
  for (const char byte : word) {
    TokenId id = byte_ids_[static_cast<unsigned char>(byte)];
    if (id == kNoToken) id = unknown_;
    if (id != kNoToken) scratch.symbols.push_back({id, 0, 0});
  }
  if (scratch.symbols.size() <= kShortWord) {
    encode_short(scratch, out);
  } else {
    encode_long(scratch, out);
  }
}

void Bpe::encode_short(Scratch& scratch, std::vector<TokenId>& out) const {
  auto& symbols = scratch.symbols;
  std::size_t count = symbols.size();
  std::array<const Entry*, kShortWord> pairs{};  // pairs[i]: the merge of symbols i and i + 1
  for (std::size_t i = 0; i + 1 < count; ++i) pairs[i] = find(symbols[i].id, symbols[i + 1].id);
  while (count > 1) {
    std::size_t best = count;
    std::uint32_t best_rank = kNone;
    for (std::size_t i = 0; i + 1 < count; ++i) {
      if (pairs[i] != nullptr && pairs[i]->rank < best_rank) {
        best = i;
        best_rank = pairs[i]->rank;
      }
    }
    if (best == count) break;
    symbols[best].id = pairs[best]->result;
    for (std::size_t i = best + 1; i + 1 < count; ++i) {
      symbols[i] = symbols[i + 1];
      pairs[i] = pairs[i + 1];
    }
    --count;
    if (best > 0) pairs[best - 1] = find(symbols[best - 1].id, symbols[best].id);
    pairs[best] = best + 1 < count ? find(symbols[best].id, symbols[best + 1].id) : nullptr;
  }
  for (std::size_t i = 0; i < count; ++i) out.push_back(symbols[i].id);
}

void Bpe::encode_long(Scratch& scratch, std::vector<TokenId>& out) const {
  auto& symbols = scratch.symbols;
  auto& heap = scratch.heap;
  heap.clear();
  const auto count = static_cast<std::uint32_t>(symbols.size());
  const auto later = [](const Scratch::Candidate& a, const Scratch::Candidate& b) {
    return a.rank != b.rank ? a.rank > b.rank : a.position > b.position;
  };
  const auto consider = [&](std::uint32_t position) {
    const TokenId left = symbols[position].id;
    const TokenId right = symbols[symbols[position].next].id;
    if (const Entry* entry = find(left, right)) heap.push_back({entry->rank, position, left, right, entry->result});
  };
  for (std::uint32_t i = 0; i < count; ++i) {
    symbols[i].previous = i == 0 ? kNone : i - 1;
    symbols[i].next = i + 1 == count ? kNone : i + 1;
  }
  for (std::uint32_t i = 0; i + 1 < count; ++i) consider(i);
  std::make_heap(heap.begin(), heap.end(), later);
  while (!heap.empty()) {
    std::pop_heap(heap.begin(), heap.end(), later);
    const Scratch::Candidate best = heap.back();
    heap.pop_back();
    Scratch::Symbol& left = symbols[best.position];
    // Entries are not taken out of the heap when a neighbour merges: those that no longer describe the word are passed over here. A
    // symbol that was merged away has no token.
    if (left.id != best.left || left.next == kNone || symbols[left.next].id != best.right) continue;
    const std::uint32_t gone = left.next;
    left.id = best.result;
    left.next = symbols[gone].next;
    symbols[gone].id = kNoToken;
    if (left.next != kNone) symbols[left.next].previous = best.position;
    if (left.previous != kNone) {
      const std::size_t before = heap.size();
      consider(left.previous);
      if (heap.size() != before) std::push_heap(heap.begin(), heap.end(), later);
    }
    if (left.next != kNone) {
      const std::size_t before = heap.size();
      consider(best.position);
      if (heap.size() != before) std::push_heap(heap.begin(), heap.end(), later);
    }
  }
  for (std::uint32_t i = 0; i != kNone; i = symbols[i].next) out.push_back(symbols[i].id);
}

}  // namespace metrale::text
