// SPDX-License-Identifier: Apache-2.0
//
// Pages as FlashInfer takes them, and what the two attention families share.
#pragma once

#include <cuda_bf16.h>

#include <flashinfer/allocator.h>
#include <flashinfer/attention/variants.cuh>
#include <flashinfer/page.cuh>

#include "bridges/flashinfer/guard.cuh"

namespace metrale::fi {

using Element = __nv_bfloat16;
using PagedKv = ::flashinfer::paged_kv_t<Element, std::int32_t>;

/// Where planning pretends that partial results begin: only offsets from it are used.
inline void* pretended_partials() noexcept { return reinterpret_cast<void*>(std::uintptr_t{4096}); }
inline constexpr std::size_t kPretendedBytes = std::size_t{1} << 44;

template <Variant V>
using AttentionOf = ::flashinfer::DefaultAttention</*use_custom_mask=*/false, V != Variant::plain, V == Variant::window_and_cap,
                                                   /*use_alibi=*/false>;

inline PagedKv paged_kv(const Pages& pages, std::uint32_t batch) {
  const std::int64_t strides[3] = {static_cast<std::int64_t>(pages.page_stride), static_cast<std::int64_t>(pages.token_stride),
                                   static_cast<std::int64_t>(pages.head_stride)};
  return PagedKv(pages.num_heads, pages.page_size, pages.head_dim, batch, ::flashinfer::QKVLayout::kNHD,
                 static_cast<Element*>(pages.k), static_cast<Element*>(pages.v), strides, pages.indices, pages.indptr,
                 pages.last_page_len);
}

template <class T>
T* at(void* base, std::int64_t offset) noexcept {
  return ::flashinfer::GetPtrFromBaseOffset<T>(base, offset);
}

}  // namespace metrale::fi
