// SPDX-License-Identifier: Apache-2.0
//
// Streams, events and host functions.
#include "support/fake_cuda/api.h"
#include "support/fake_cuda/state.h"

namespace metrale::fake_cuda {

namespace {

/// Answers for a stream that may not be asked while it is captured, and ends the capture.
CUresult refuse_captured(Call& call, const Stream& stream) {
  return stream.capture ? call->invalidate(*stream.capture, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED) : CUDA_SUCCESS;
}

/// As above for an event that was last recorded in a capture.
CUresult refuse_captured(Call& call, const Event& event) {
  if (!event.capture) return CUDA_SUCCESS;
  if (event.capture->is_ended) return CUDA_ERROR_CAPTURED_EVENT;
  return call->invalidate(*event.capture, CUDA_ERROR_CAPTURED_EVENT);
}

}  // namespace

namespace api {

CUresult cuStreamCreateWithPriority(CUstream* handle, unsigned flags, int priority) {
  Call call(kInContext);
  if (!call) return call.code;
  if (flags != CU_STREAM_DEFAULT && flags != CU_STREAM_NON_BLOCKING) return CUDA_ERROR_INVALID_VALUE;
  auto stream = std::make_shared<Stream>();
  stream->context = call.context;
  stream->is_blocking = flags == CU_STREAM_DEFAULT;
  stream->priority = std::clamp(priority, -5, 0);
  call.context->streams.insert(stream);
  *handle = call->streams.add(std::move(stream));
  return CUDA_SUCCESS;
}

CUresult cuStreamDestroy(CUstream handle) {
  Call call(kInContext);
  const std::shared_ptr<Stream> stream = call ? call.stream(handle) : nullptr;
  if (!call) return call.code;
  if (stream == call.context->null_stream) return CUDA_ERROR_INVALID_HANDLE;
  if (stream->capture) {
    // The capture is lost with it.
    call->misuse("a stream was destroyed while captured");
    return refuse_captured(call, *stream);
  }
  call->streams.remove(handle);
  stream->context->streams.erase(stream);
  return CUDA_SUCCESS;
}

CUresult cuStreamSynchronize(CUstream handle) {
  Call call(kInContext);
  const std::shared_ptr<Stream> stream = call ? call.stream(handle) : nullptr;
  if (!call) return call.code;
  if (const CUresult code = refuse_captured(call, *stream); code != CUDA_SUCCESS) return code;
  return call->wait(call.lock, *stream->context, stream->last);
}

CUresult cuStreamQuery(CUstream handle) {
  Call call(kInContext);
  const std::shared_ptr<Stream> stream = call ? call.stream(handle) : nullptr;
  if (!call) return call.code;
  if (const CUresult code = refuse_captured(call, *stream); code != CUDA_SUCCESS) return code;
  return stream->last == nullptr || stream->last->is_done ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult cuStreamGetCtx(CUstream handle, CUcontext* context) {
  Call call(kInContext);
  const std::shared_ptr<Stream> stream = call ? call.stream(handle) : nullptr;
  if (!call) return call.code;
  *context = stream->context->device->primary_handle;
  return CUDA_SUCCESS;
}

CUresult cuLaunchHostFunc(CUstream handle, CUhostFn fn, void* data) {
  Call call(kInContext);
  const std::shared_ptr<Stream> stream = call ? call.stream(handle) : nullptr;
  if (!call) return call.code;
  if (fn == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return submit(call, stream, CU_GRAPH_NODE_TYPE_HOST, [fn, data] {
    fn(data);
    return CUDA_SUCCESS;
  });
}

// ---- events ----

CUresult cuEventCreate(CUevent* handle, unsigned flags) {
  Call call(kInContext);
  if (!call) return call.code;
  if ((flags & ~7U) != 0) return CUDA_ERROR_INVALID_VALUE;
  auto event = std::make_shared<Event>();
  event->context = call.context.get();
  event->is_timed = (flags & CU_EVENT_DISABLE_TIMING) == 0;
  *handle = call->events.add(std::move(event));
  return CUDA_SUCCESS;
}

CUresult cuEventDestroy(CUevent handle) {
  Call call(kInContext);
  if (call && call.event(handle) != nullptr && call) call->events.remove(handle);
  return call.code;
}

CUresult cuEventRecord(CUevent handle, CUstream stream_handle) {
  Call call(kInContext);
  const std::shared_ptr<Event> event = call ? call.event(handle) : nullptr;
  const std::shared_ptr<Stream> stream = call ? call.stream(stream_handle) : nullptr;
  if (!call) return call.code;
  if (event->context != stream->context.get()) return CUDA_ERROR_INVALID_HANDLE;
  if (stream->capture) {
    if (stream->capture->is_invalid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    event->record = nullptr;
    event->capture = stream->capture;
    event->tail = stream->tail;
    return CUDA_SUCCESS;
  }
  event->capture = nullptr;
  event->tail.clear();
  event->record = call->enqueue(call.lock, stream, {});
  return CUDA_SUCCESS;
}

CUresult cuEventQuery(CUevent handle) {
  Call call(kInContext);
  const std::shared_ptr<Event> event = call ? call.event(handle) : nullptr;
  if (!call) return call.code;
  if (const CUresult code = refuse_captured(call, *event); code != CUDA_SUCCESS) return code;
  if (const CUresult code = call->unsafe(); code != CUDA_SUCCESS) return code;
  return event->record == nullptr || event->record->is_done ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult cuEventSynchronize(CUevent handle) {
  Call call(kInContext);
  const std::shared_ptr<Event> event = call ? call.event(handle) : nullptr;
  if (!call) return call.code;
  if (const CUresult code = refuse_captured(call, *event); code != CUDA_SUCCESS) return code;
  if (const CUresult code = call->unsafe(); code != CUDA_SUCCESS) return code;
  return call->wait(call.lock, *event->context, event->record);
}

CUresult cuEventElapsedTime(float* milliseconds, CUevent start, CUevent end) {
  Call call(kInContext);
  const std::shared_ptr<Event> first = call ? call.event(start) : nullptr;
  const std::shared_ptr<Event> last = call ? call.event(end) : nullptr;
  if (!call) return call.code;
  for (const auto& event : {first, last}) {
    if (const CUresult code = refuse_captured(call, *event); code != CUDA_SUCCESS) return code;
    if (!event->is_timed || event->record == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  }
  if (!first->record->is_done || !last->record->is_done) return CUDA_ERROR_NOT_READY;
  *milliseconds = std::chrono::duration<float, std::milli>(last->record->at - first->record->at).count();
  return CUDA_SUCCESS;
}

CUresult cuStreamWaitEvent(CUstream stream_handle, CUevent handle, unsigned flags) {
  Call call(kInContext);
  const std::shared_ptr<Event> event = call ? call.event(handle) : nullptr;
  const std::shared_ptr<Stream> stream = call ? call.stream(stream_handle) : nullptr;
  if (!call) return call.code;
  if (flags != 0 && flags != CU_EVENT_WAIT_EXTERNAL) return CUDA_ERROR_INVALID_VALUE;
  if (stream->capture && stream->capture->is_invalid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  if (event->capture) {
    Capture& capture = *event->capture;
    if (capture.is_ended) {
      if (stream->capture) return call->invalidate(*stream->capture, CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
      return CUDA_ERROR_CAPTURED_EVENT;
    }
    if (capture.is_invalid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    if (stream->capture && stream->capture != event->capture) {
      call->invalidate(capture, CUDA_ERROR_STREAM_CAPTURE_MERGE);
      return call->invalidate(*stream->capture, CUDA_ERROR_STREAM_CAPTURE_MERGE);
    }
    if (stream == stream->context->null_stream) return call->invalidate(capture, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
    if (!stream->capture) {
      stream->capture = event->capture;
      stream->tail.clear();
      if (call->options.idle_forks_count) {
        Node& fork = *capture.forks.emplace_back(std::make_unique<Node>());
        fork.after = event->tail;
        stream->tail.push_back(&fork);
        return CUDA_SUCCESS;
      }
    }
    for (Node* node : event->tail) {
      if (std::find(stream->tail.begin(), stream->tail.end(), node) == stream->tail.end()) stream->tail.push_back(node);
    }
    return CUDA_SUCCESS;
  }
  if (event->record == nullptr) return CUDA_SUCCESS;
  if (stream->capture) return call->invalidate(*stream->capture, CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
  if (event->record->is_done) return CUDA_SUCCESS;
  Work wait;
  wait.after.push_back(event->record);
  call->enqueue(call.lock, stream, std::move(wait));
  return CUDA_SUCCESS;
}

}  // namespace api
}  // namespace metrale::fake_cuda
