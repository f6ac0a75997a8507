// SPDX-License-Identifier: Apache-2.0
//
// Stream capture: who may begin and end it, what ends it badly, and which streams it has taken in.
#include <set>

#include "support/fake_cuda/api.h"
#include "support/fake_cuda/state.h"

namespace metrale::fake_cuda {

namespace {

/// Whether `stream` has nodes that the origin does not come after.
bool has_unjoined_work(const Stream& stream, const std::vector<Node*>& joined) {
  std::set<const Node*> reached;
  std::vector<const Node*> open(joined.begin(), joined.end());
  while (!open.empty()) {
    const Node* node = open.back();
    open.pop_back();
    if (reached.insert(node).second) open.insert(open.end(), node->after.begin(), node->after.end());
  }
  return std::any_of(stream.tail.begin(), stream.tail.end(), [&](const Node* node) { return !reached.contains(node); });
}

}  // namespace

void State::end(Capture& capture) {
  capture.is_ended = true;
  graphs.remove(capture.graph_handle);
  capture.graph = nullptr;  // events may keep the capture
  capture.forks.clear();
  for (const auto& stream : capture.context->streams) {
    if (stream->capture.get() != &capture) continue;
    stream->tail.clear();
    stream->capture = nullptr;
  }
  std::erase_if(captures, [&](const auto& open) { return open.get() == &capture; });
}

namespace api {

CUresult cuStreamBeginCapture(CUstream handle, CUstreamCaptureMode mode) {
  Call call(kInContext);
  const std::shared_ptr<Stream> stream = call ? call.stream(handle) : nullptr;
  if (!call) return call.code;
  if (mode > CU_STREAM_CAPTURE_MODE_RELAXED) return CUDA_ERROR_INVALID_VALUE;
  if (stream == call.context->null_stream) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  if (stream->capture) return CUDA_ERROR_ILLEGAL_STATE;
  auto capture = std::make_shared<Capture>();
  capture->id = ++call->num_captures;
  capture->mode = mode;
  capture->thread = std::this_thread::get_id();
  capture->context = stream->context.get();
  capture->origin = stream.get();
  capture->graph->context = stream->context->device->primary_handle;
  stream->capture = capture;
  stream->tail.clear();
  call->captures.push_back(std::move(capture));
  return CUDA_SUCCESS;
}

CUresult cuStreamEndCapture(CUstream handle, CUgraph* graph) {
  Call call(kInContext);
  const std::shared_ptr<Stream> stream = call ? call.stream(handle) : nullptr;
  if (!call) return call.code;
  *graph = nullptr;
  const std::shared_ptr<Capture> capture = stream->capture;
  if (!capture) return CUDA_ERROR_ILLEGAL_STATE;
  if (capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED && capture->thread != std::this_thread::get_id())
    return CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
  if (capture->origin != stream.get()) return call->invalidate(*capture, CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
  CUresult code = capture->is_invalid ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_SUCCESS;
  for (const auto& other : capture->context->streams) {
    if (code == CUDA_SUCCESS && other->capture == capture && other != stream && has_unjoined_work(*other, stream->tail))
      code = CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
  }
  const CUgraph known = std::exchange(capture->graph_handle, nullptr);
  const std::shared_ptr<Graph> captured = capture->graph;
  call->end(*capture);
  if (code != CUDA_SUCCESS) {
    call->graphs.remove(known);
    return code;
  }
  call->publish(*captured);
  *graph = known != nullptr ? known : call->graphs.add(captured);
  return CUDA_SUCCESS;
}

CUresult cuStreamIsCapturing(CUstream handle, CUstreamCaptureStatus* status) {
  Call call(kInContext);
  const std::shared_ptr<Stream> stream = call ? call.stream(handle) : nullptr;
  if (!call) return call.code;
  *status = !stream->capture              ? CU_STREAM_CAPTURE_STATUS_NONE
            : stream->capture->is_invalid ? CU_STREAM_CAPTURE_STATUS_INVALIDATED
                                          : CU_STREAM_CAPTURE_STATUS_ACTIVE;
  return CUDA_SUCCESS;
}

CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
  Call call(kAnywhere);
  if (!call) return call.code;
  if (*mode > CU_STREAM_CAPTURE_MODE_RELAXED) return CUDA_ERROR_INVALID_VALUE;
  std::swap(thread_capture_mode, *mode);
  return CUDA_SUCCESS;
}

/// Of the graph of an open capture only its user objects may be changed. Its nodes have no handles yet: asked for, they are none.
CUresult cuStreamGetCaptureInfo(CUstream handle, CUstreamCaptureStatus* status, cuuint64_t* id, CUgraph* graph,
                                const CUgraphNode** nodes, const CUgraphEdgeData** edges, std::size_t* num_nodes) {
  if (const CUresult code = api::cuStreamIsCapturing(handle, status); code != CUDA_SUCCESS) return code;
  Call call(kInContext);
  const std::shared_ptr<Stream> stream = call ? call.stream(handle) : nullptr;
  if (!call) return call.code;
  if (id != nullptr) *id = stream->capture ? stream->capture->id : 0;
  if (graph != nullptr) {
    *graph = nullptr;
    if (Capture* capture = stream->capture.get()) {
      if (capture->graph_handle == nullptr) capture->graph_handle = call->graphs.add(capture->graph);
      *graph = capture->graph_handle;
    }
  }
  if (nodes != nullptr) *nodes = nullptr;
  if (edges != nullptr) *edges = nullptr;
  if (num_nodes != nullptr) *num_nodes = 0;
  return CUDA_SUCCESS;
}

}  // namespace api
}  // namespace metrale::fake_cuda
