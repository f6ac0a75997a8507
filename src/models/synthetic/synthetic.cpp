// SPDX-License-Identifier: Apache-2.0
#include "metrale/models/synthetic.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "metrale/dequantise.h"
#include "models/decoder/model_weights.h"

namespace metrale {
namespace {

// Odd, so that neither rows nor tensors start at the same place of the pattern again soon.
constexpr std::uint64_t kPatternElements = (std::uint64_t{4} << 20) - 3;
constexpr float kDeviation = 0.02F;

struct Tensor {
  std::string name;
  std::vector<std::uint64_t> shape;
  bool ones = false;
  std::uint64_t begin = 0;  // in the source
  std::uint64_t end = 0;
};

/// Close to normal: the sum of four uniform numbers.
class Normal {
 public:
  explicit Normal(std::uint64_t seed) : state_(seed) {}
  float next() {
    // Source: splitmix64.
    std::uint64_t z = state_ += 0x9e37'79b9'7f4a'7c15;
    z = (z ^ (z >> 30)) * 0xbf58'476d'1ce4'e5b9;
    z = (z ^ (z >> 27)) * 0x94d0'49bb'1331'11eb;
    z ^= z >> 31;
    std::int32_t sum = -2 * 0xffff;
    for (int i = 0; i < 4; ++i) sum += static_cast<std::int32_t>(z >> (16 * i) & 0xffff);
    return static_cast<float>(sum) * (1.7320508F / 65536.0F);  // four uniform numbers of variance 1/12 each
  }

 private:
  std::uint64_t state_;
};

std::vector<std::byte> encode(DType dtype, std::uint64_t count, auto value) {
  std::vector<std::byte> bytes(count * (dtype == DType::bf16 ? 2 : 4));
  for (std::uint64_t i = 0; i < count; ++i) {
    const float v = value();
    if (dtype == DType::bf16) {
      const std::uint16_t bits = f32_to_bf16(v);
      std::memcpy(bytes.data() + 2 * i, &bits, 2);
    } else {
      std::memcpy(bytes.data() + 4 * i, &v, 4);
    }
  }
  return bytes;
}

/// A safetensors file that is made up as it is read.
class RandomSource final : public ByteSource {
 public:
  RandomSource(std::string label, std::vector<std::byte> header, std::vector<Tensor> tensors, DType dtype, std::uint64_t seed)
      : ByteSource(std::move(label), tensors.empty() ? header.size() : tensors.back().end),
        header_(std::move(header)),
        tensors_(std::move(tensors)) {
    pattern_ = encode(dtype, kPatternElements, [normal = Normal(seed)]() mutable { return kDeviation * normal.next(); });
    ones_ = encode(dtype, 4096, [] { return 1.0F; });
  }

 private:
  Result<> do_read(std::uint64_t offset, std::span<std::byte> dst) const override {
    while (!dst.empty()) {
      std::size_t bytes = 0;
      if (offset < header_.size()) {
        bytes = std::min<std::size_t>(dst.size(), header_.size() - offset);
        std::memcpy(dst.data(), header_.data() + offset, bytes);
      } else {
        const auto at = std::ranges::upper_bound(tensors_, offset, {}, &Tensor::end);
        const std::vector<std::byte>& from = at->ones ? ones_ : pattern_;
        const std::uint64_t start = (offset - header_.size()) % from.size();
        bytes = std::min<std::uint64_t>({dst.size(), at->end - offset, from.size() - start});
        std::memcpy(dst.data(), from.data() + start, bytes);
      }
      offset += bytes;
      dst = dst.subspan(bytes);
    }
    return {};
  }

  std::vector<std::byte> header_;
  std::vector<Tensor> tensors_;  // by place
  std::vector<std::byte> pattern_;
  std::vector<std::byte> ones_;  // a whole number of elements, as the pattern is
};

std::vector<Tensor> tensors_of(const ModelConfig& config) {
  std::vector<Tensor> tensors;
  for (models::TensorWant& want : models::ModelWeights::wanted(config)) {
    const bool norm = want.shape.size() == 1 && want.name.ends_with("norm.weight");
    tensors.push_back({.name = std::move(want.name), .shape = std::move(want.shape), .ones = norm});
  }
  return tensors;
}

/// Lays the tensors out behind a header, which is returned.
std::vector<std::byte> place(std::vector<Tensor>& tensors, DType dtype) {
  std::string json = "{";
  std::uint64_t at = 0;
  for (Tensor& tensor : tensors) {
    std::uint64_t bytes = dtype == DType::bf16 ? 2 : 4;
    for (const std::uint64_t d : tensor.shape) bytes *= d;
    json += fmt::format("{}\"{}\":{{\"dtype\":\"{}\",\"shape\":[{}],\"data_offsets\":[{},{}]}}", json.size() == 1 ? "" : ",",
                        tensor.name, dtype == DType::bf16 ? "BF16" : "F32", fmt::join(tensor.shape, ","), at, at + bytes);
    tensor.begin = at;
    tensor.end = at += bytes;
  }
  json += "}";
  json.resize(round_up(json.size(), 8), ' ');
  std::vector<std::byte> header(8 + json.size());
  for (int i = 0; i < 8; ++i) header[i] = static_cast<std::byte>(json.size() >> (8 * i));
  std::memcpy(header.data() + 8, json.data(), json.size());
  for (Tensor& tensor : tensors) {
    tensor.begin += header.size();
    tensor.end += header.size();
  }
  return header;
}

}  // namespace

Result<std::unique_ptr<Decoder>> SyntheticModel::make_decoder(GpuBackend& backend, const DecoderOptions& options) const {
  return Decoder::create(backend, config, *file, *weights, options);
}

Result<SyntheticModel> make_synthetic(GpuBackend& backend, const ModelConfig& config, DType dtype, std::uint64_t seed) {
  if (dtype != DType::bf16 && dtype != DType::f32)
    return Error(Errc::unsupported, fmt::format("random weights of type {}; bf16 and f32 can be made", to_string(dtype)));
  if (config.weights != WeightFormat::hugging_face)
    return Error(Errc::unsupported, "random weights for a configuration read from GGUF; give one of Hugging Face form");
  std::vector<Tensor> tensors = tensors_of(config);
  std::vector<std::byte> header = place(tensors, dtype);
  SyntheticModel model;
  model.config = config;
  model.file = METRALE_TRY(
      WeightFile::open(std::make_unique<RandomSource>("random weights", std::move(header), std::move(tensors), dtype, seed)));
  const std::vector<std::string> names = METRALE_TRY(Decoder::tensors(backend, config, *model.file));
  WeightLoadOptions load;
  load.staging_bytes = std::uint64_t{32} << 20;
  model.weights = METRALE_TRY(WeightStore::load(backend, *model.file, names, load));
  return model;
}

}  // namespace metrale
