// SPDX-License-Identifier: Apache-2.0
//
// Modules. An image is a text that looks like PTX as far as the head, which says the architecture:
//
//     // fake-cuda-module 1
//     .version 8.0
//     .target sm_80
//     module decoder
//     kernel fill shared=0 threads=1024 8 4 8      (the sizes of its arguments)
//     global fill_n_tile 4 64                      (bytes, and the value of the first eight of them)
#include <cstring>
#include <sstream>

#include "support/fake_cuda/api.h"
#include "support/fake_cuda/state.h"

namespace metrale::fake_cuda {

namespace {

constexpr std::string_view kMagic = "// fake-cuda-module 1\n";

/// Reads "name=number"; false when `word` is none.
bool read_setting(const std::string& word, std::string_view name, int& value) {
  if (!word.starts_with(name) || word.size() <= name.size() || word[name.size()] != '=') return false;
  value = std::stoi(word.substr(name.size() + 1));
  return true;
}

std::shared_ptr<Function> read_kernel(std::istringstream& words) {
  auto function = std::make_shared<Function>();
  words >> function->name;
  std::uint32_t offset = 0;
  for (std::string word; words >> word;) {
    if (read_setting(word, "shared", function->static_shared_bytes) || read_setting(word, "threads", function->max_threads))
      continue;
    const auto bytes = static_cast<std::uint32_t>(std::stoul(word));
    const std::uint32_t alignment = std::min(bytes & (~bytes + 1), 8U);
    offset = (offset + alignment - 1) / alignment * alignment;
    function->param_bytes.push_back(bytes);
    function->param_offsets.push_back(offset);
    offset += bytes;
  }
  return function;
}

/// Fills `module` from the text; the answer of the driver.
CUresult read_image(State& state, Context& context, std::string_view text, CUmodule handle, Module& module) {
  std::istringstream lines{std::string(text)};
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string key;
    words >> key;
    if (key.empty() || key == "//" || key == ".version") continue;
    if (key == ".target") {
      std::string target;
      words >> target;
      if (!target.starts_with("sm_")) return CUDA_ERROR_INVALID_IMAGE;
      if (std::stoi(target.substr(3)) > context.device->options.compute_capability) return CUDA_ERROR_NO_BINARY_FOR_GPU;
    } else if (key == "module") {
      words >> module.name;
    } else if (key == "kernel") {
      const std::shared_ptr<Function> function = read_kernel(words);
      const auto known = state.kernels.find({module.name, function->name});
      if (known == state.kernels.end()) return CUDA_ERROR_INVALID_IMAGE;
      function->fn = known->second;
      function->full_name = module.name + "." + function->name;
      function->context = &context;
      function->module = handle;
      module.functions.emplace_back(state.functions.add(function), function);
    } else if (key == "global") {
      std::string name;
      std::uint64_t bytes = 0, value = 0, address = 0;
      words >> name >> bytes >> value;
      if (const CUresult code = state.allocate(context, BlockKind::global, bytes, &address); code != CUDA_SUCCESS) return code;
      auto* memory = reinterpret_cast<std::byte*>(static_cast<std::uintptr_t>(address));
      std::memset(memory, 0, bytes);
      std::memcpy(memory, &value, std::min<std::size_t>(bytes, sizeof(value)));
      module.globals.emplace(name, address);
    } else {
      return CUDA_ERROR_INVALID_IMAGE;
    }
  }
  return CUDA_SUCCESS;
}

void drop(State& state, Module& module) {
  for (const auto& [handle, function] : module.functions) {
    function->is_unloaded = true;
    state.functions.remove(handle);
  }
  for (const auto& [name, address] : module.globals) state.release_block(address);
}

std::shared_ptr<Module> find_module(Call& call, CUmodule handle) {
  std::shared_ptr<Module> module = call ? call->modules.find(handle) : nullptr;
  if (module == nullptr && call) {
    call->misuse("a module was used that is not there");
    call.code = CUDA_ERROR_INVALID_HANDLE;
  }
  return module;
}

std::shared_ptr<Function> find_function(Call& call, CUfunction handle) {
  std::shared_ptr<Function> function = call ? call->functions.find(handle) : nullptr;
  if (function == nullptr && call) {
    call->misuse("a function was used that is not there");
    call.code = CUDA_ERROR_INVALID_HANDLE;
  }
  return function;
}

}  // namespace

namespace api {

CUresult cuModuleLoadDataEx(CUmodule* handle, const void* image, unsigned num_options, CUjit_option* options, void** values) {
  Call call(kInContext | kUnsafe);
  if (!call) return call.code;
  if (num_options > 0 && (options == nullptr || values == nullptr)) return CUDA_ERROR_INVALID_VALUE;
  if (image == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (std::strncmp(static_cast<const char*>(image), kMagic.data(), kMagic.size()) != 0) return CUDA_ERROR_INVALID_IMAGE;
  auto module = std::make_shared<Module>();
  module->context = call.context.get();
  *handle = call->modules.add(module);
  const CUresult code = read_image(*call.state, *call.context, static_cast<const char*>(image), *handle, *module);
  if (code != CUDA_SUCCESS) {
    drop(*call.state, *module);
    call->modules.remove(*handle);
    *handle = nullptr;
  }
  return code;
}

CUresult cuModuleUnload(CUmodule handle) {
  Call call(kInContext | kUnsafe);
  const std::shared_ptr<Module> module = find_module(call, handle);
  if (!call) return call.code;
  if (const CUresult code = call->wait_for_all(call.lock, *module->context); code != CUDA_SUCCESS) return code;
  if (call->modules.remove(handle) != nullptr) drop(*call.state, *module);
  return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction* found, CUmodule handle, const char* name) {
  Call call(kInContext);
  const std::shared_ptr<Module> module = find_module(call, handle);
  if (!call) return call.code;
  for (const auto& [function_handle, function] : module->functions) {
    if (function->name != name) continue;
    *found = function_handle;
    return CUDA_SUCCESS;
  }
  return CUDA_ERROR_NOT_FOUND;
}

CUresult cuModuleGetGlobal(CUdeviceptr* address, std::size_t* bytes, CUmodule handle, const char* name) {
  Call call(kInContext);
  const std::shared_ptr<Module> module = find_module(call, handle);
  if (!call) return call.code;
  const auto found = module->globals.find(std::string_view(name));
  if (found == module->globals.end()) {
    call->write_log("a global that is not there was asked for");
    return CUDA_ERROR_NOT_FOUND;
  }
  if (address != nullptr) *address = found->second;
  if (bytes != nullptr) *bytes = call->blocks.at(found->second).bytes;
  return CUDA_SUCCESS;
}

CUresult cuModuleGetFunctionCount(unsigned* count, CUmodule handle) {
  Call call(kInContext);
  const std::shared_ptr<Module> module = find_module(call, handle);
  if (call) *count = static_cast<unsigned>(module->functions.size());
  return call.code;
}

CUresult cuModuleEnumerateFunctions(CUfunction* functions, unsigned count, CUmodule handle) {
  Call call(kInContext);
  const std::shared_ptr<Module> module = find_module(call, handle);
  if (!call) return call.code;
  for (unsigned i = 0; i < count && i < module->functions.size(); ++i) functions[i] = module->functions[i].first;
  return CUDA_SUCCESS;
}

CUresult cuFuncGetName(const char** name, CUfunction handle) {
  Call call(kInContext);
  const std::shared_ptr<Function> function = find_function(call, handle);
  if (call) *name = function->name.c_str();
  return call.code;
}

CUresult cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction handle) {
  Call call(kInContext);
  const std::shared_ptr<Function> function = find_function(call, handle);
  if (!call) return call.code;
  switch (attribute) {
    case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *value = function->max_threads; break;
    case CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES: *value = function->static_shared_bytes; break;
    case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: *value = function->max_dynamic_shared_bytes; break;
    case CU_FUNC_ATTRIBUTE_NUM_REGS: *value = 32; break;
    default: *value = 0; break;
  }
  return CUDA_SUCCESS;
}

CUresult cuFuncSetAttribute(CUfunction handle, CUfunction_attribute attribute, int value) {
  Call call(kInContext);
  const std::shared_ptr<Function> function = find_function(call, handle);
  if (!call) return call.code;
  if (attribute == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) {
    if (value < 0 || value + function->static_shared_bytes > (227 << 10)) return CUDA_ERROR_INVALID_VALUE;
    function->max_dynamic_shared_bytes = value;
  }
  if (attribute == CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED) function->allows_wide_clusters = value != 0;
  return CUDA_SUCCESS;
}

CUresult cuFuncGetParamInfo(CUfunction handle, std::size_t index, std::size_t* offset, std::size_t* bytes) {
  Call call(kInContext);
  const std::shared_ptr<Function> function = find_function(call, handle);
  if (!call) return call.code;
  if (index >= function->param_bytes.size()) {
    call->write_log("a parameter past the last was asked for");
    return CUDA_ERROR_INVALID_VALUE;
  }
  *offset = function->param_offsets[index];
  if (bytes != nullptr) *bytes = function->param_bytes[index];
  return CUDA_SUCCESS;
}

/// A CUkernel of the fake is its CUfunction.
CUresult cuKernelGetParamInfo(CUkernel kernel, std::size_t index, std::size_t* offset, std::size_t* bytes) {
  return api::cuFuncGetParamInfo(reinterpret_cast<CUfunction>(kernel), index, offset, bytes);
}

CUresult cuFuncLoad(CUfunction handle) {
  Call call(kInContext | kUnsafe);
  const std::shared_ptr<Function> function = find_function(call, handle);
  if (call) function->is_loaded = true;
  return call.code;
}

}  // namespace api
}  // namespace metrale::fake_cuda
