// SPDX-License-Identifier: Apache-2.0
//
// What the functions of the table share: the state they reach, the context they need, and what a capture forbids.
#include "support/fake_cuda/state.h"

namespace metrale::fake_cuda {

Call::Call(unsigned needs) : state(current_state.load()) {
  if (state == nullptr) {
    code = CUDA_ERROR_DEINITIALIZED;
    return;
  }
  lock = State::Lock(state->mutex);
  if (in_host_function) {
    state->misuse("a host function called the driver");
    code = CUDA_ERROR_NOT_PERMITTED;
    return;
  }
  if (!state->is_initialised) {
    code = CUDA_ERROR_NOT_INITIALIZED;
    return;
  }
  if ((needs & kInContext) != 0) {
    context = state->contexts.find(current_context);
    if (context == nullptr) {
      code = current_context == nullptr ? CUDA_ERROR_INVALID_CONTEXT : CUDA_ERROR_CONTEXT_IS_DESTROYED;
      return;
    }
    if (context->sticky != CUDA_SUCCESS) {
      code = context->sticky;
      return;
    }
  }
  if ((needs & kUnsafe) != 0) code = state->unsafe();
}

std::shared_ptr<Stream> Call::stream(CUstream handle) {
  if (reinterpret_cast<std::uintptr_t>(handle) <= 2) return context->null_stream;  // null, legacy, per thread
  std::shared_ptr<Stream> found = state->streams.find(handle);
  if (found == nullptr) {
    state->misuse("a stream was used that is not there");
    code = CUDA_ERROR_INVALID_HANDLE;
  } else if (found->context->sticky != CUDA_SUCCESS) {
    code = found->context->sticky;
  }
  return found;
}

std::shared_ptr<Event> Call::event(CUevent handle) {
  std::shared_ptr<Event> found = state->events.find(handle);
  if (found == nullptr) {
    state->misuse("an event was used that is not there");
    code = CUDA_ERROR_INVALID_HANDLE;
  } else if (found->context->sticky != CUDA_SUCCESS) {
    code = found->context->sticky;
  }
  return found;
}

CUresult State::unsafe() {
  CUresult code = CUDA_SUCCESS;
  if (thread_capture_mode == CU_STREAM_CAPTURE_MODE_RELAXED) return code;
  for (const auto& capture : captures) {
    const bool mine = capture->thread == std::this_thread::get_id() && capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED;
    const bool global = capture->mode == CU_STREAM_CAPTURE_MODE_GLOBAL && thread_capture_mode == CU_STREAM_CAPTURE_MODE_GLOBAL;
    if (mine || global) code = invalidate(*capture, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  }
  return code;
}

CUresult submit(Call& call, const std::shared_ptr<Stream>& stream, CUgraphNodeType type, std::function<CUresult()> run,
                std::shared_ptr<KernelCall> kernel, DonePtr* done) {
  if (const std::shared_ptr<Capture>& capture = stream->capture) {
    if (capture->is_invalid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    auto node = std::make_shared<Node>();
    node->type = type;
    node->after = stream->tail;
    node->run = std::move(run);
    node->kernel = std::move(kernel);
    stream->tail = {node.get()};
    capture->graph->nodes.push_back(std::move(node));
    return CUDA_SUCCESS;
  }
  if (stream == stream->context->null_stream) {
    // Blocking streams that are captured cannot be waited for.
    CUresult code = CUDA_SUCCESS;
    for (const auto& other : stream->context->streams) {
      if (other->is_blocking && other->capture) code = call->invalidate(*other->capture, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
    }
    if (code != CUDA_SUCCESS) return code;
  }
  Work work;
  work.run = std::move(run);
  work.is_host_function = type == CU_GRAPH_NODE_TYPE_HOST;
  const DonePtr end = call->enqueue(call.lock, stream, std::move(work));
  if (done != nullptr) *done = end;
  return CUDA_SUCCESS;
}

}  // namespace metrale::fake_cuda
