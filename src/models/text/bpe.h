// SPDX-License-Identifier: Apache-2.0
//
// Byte pair encoding of one word: adjacent symbols are merged, the pair that comes first in the list of merges first, the leftmost
// of equal ones first, until no pair is listed.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>
#include <vector>

#include "metrale/models/tokenizer.h"

namespace metrale::text {

struct Merge {
  TokenId left;
  TokenId right;
  TokenId result;
};

class Bpe {
 public:
  static constexpr TokenId kNoToken = -1;

  /// `byte_ids`: the token of each single byte or kNoToken. `merges` by rank, without repetition, ids below `vocab_size`.
  /// `unknown`: what a byte without a token becomes; kNoToken leaves it out.
  Bpe(const std::array<TokenId, 256>& byte_ids, const std::vector<Merge>& merges, std::size_t vocab_size, TokenId unknown);
  Bpe() = default;

  /// Memory that `encode` keeps between words. One for each thread.
  struct Scratch {
    struct Symbol {
      TokenId id;
      std::uint32_t previous;
      std::uint32_t next;
    };
    struct Candidate {
      std::uint32_t rank;
      std::uint32_t position;
      TokenId left;
      TokenId right;
      TokenId result;
    };
    std::vector<Symbol> symbols;
    std::vector<Candidate> heap;
  };

  /// Appends the ids of `word`, shorter than 2^32 - 1 bytes. Takes n log n for n bytes.
  void encode(std::string_view word, std::vector<TokenId>& out, Scratch& scratch) const;

 private:
  struct Entry {
    TokenId right;
    TokenId result;
    std::uint32_t rank;
  };
  const Entry* find(TokenId left, TokenId right) const noexcept;
  void encode_short(Scratch& scratch, std::vector<TokenId>& out) const;
  void encode_long(Scratch& scratch, std::vector<TokenId>& out) const;

  std::array<TokenId, 256> byte_ids_ = {};
  TokenId unknown_ = kNoToken;
  // Merges grouped by left symbol and sorted by right within: entries of `left` are first_[left] … first_[left + 1]. Unlike a hash
  // table it has no worst case that a hostile file could aim for.
  std::vector<std::uint32_t> first_;
  std::vector<Entry> entries_;
};

}  // namespace metrale::text
