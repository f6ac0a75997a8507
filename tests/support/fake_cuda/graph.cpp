// SPDX-License-Identifier: Apache-2.0
//
// Graphs, their executable forms, their nodes, and the user objects that they keep alive.
#include "support/fake_cuda/api.h"
#include "support/fake_cuda/state.h"

namespace metrale::fake_cuda {

namespace {

template <class T>
std::shared_ptr<T> known(Call& call, std::shared_ptr<T> found, const char* what) {
  if (found == nullptr && call) {
    call->misuse(std::string(what) + " was used that is not there");
    call.code = CUDA_ERROR_INVALID_VALUE;
  }
  return found;
}

/// Runs the nodes of a graph one after the other, each after what it depends on.
CUresult run_nodes(const Graph& graph) {
  for (const auto& node : graph.nodes) {
    in_host_function = node->type == CU_GRAPH_NODE_TYPE_HOST;
    const CUresult code = node->child ? run_nodes(*node->child) : node->run ? node->run() : CUDA_SUCCESS;
    in_host_function = false;
    if (code != CUDA_SUCCESS) return code;
  }
  return CUDA_SUCCESS;
}

}  // namespace

void State::publish(Graph& graph) {
  for (const auto& node : graph.nodes) {
    if (node->handle == nullptr) node->handle = nodes.add(node);
    if (node->child) {
      publish(*node->child);
      if (node->child_handle == nullptr) node->child_handle = graphs.add(node->child);
    }
  }
}

void State::retract(Graph& graph) {
  for (const auto& node : graph.nodes) {
    if (node->handle != nullptr) nodes.remove(node->handle);
    node->handle = nullptr;
    if (node->child) {
      retract(*node->child);
      graphs.remove(node->child_handle);
      node->child_handle = nullptr;
    }
  }
}

namespace api {

CUresult cuGraphDestroy(CUgraph handle) {
  Call call(kAnywhere);
  const std::shared_ptr<Graph> graph = call ? known(call, call->graphs.find(handle), "a graph") : nullptr;
  if (!call) return call.code;
  call->graphs.remove(handle);
  call->retract(*graph);
  return CUDA_SUCCESS;
}

CUresult cuGraphInstantiateWithFlags(CUgraphExec* handle, CUgraph graph_handle, unsigned long long flags) {
  Call call(kInContext);
  const std::shared_ptr<Graph> graph = call ? known(call, call->graphs.find(graph_handle), "a graph") : nullptr;
  if (!call) return call.code;
  if ((flags & ~15ULL) != 0) return CUDA_ERROR_INVALID_VALUE;
  auto exec = std::make_shared<GraphExec>();
  exec->graph = *graph;
  exec->context = call.context.get();
  *handle = call->execs.add(std::move(exec));
  return CUDA_SUCCESS;
}

CUresult cuGraphUpload(CUgraphExec handle, CUstream stream_handle) {
  Call call(kInContext);
  const std::shared_ptr<GraphExec> exec = call ? known(call, call->execs.find(handle), "an executable graph") : nullptr;
  const std::shared_ptr<Stream> stream = call ? call.stream(stream_handle) : nullptr;
  if (!call) return call.code;
  if (stream->capture) return call->invalidate(*stream->capture, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  call->enqueue(call.lock, stream, {});
  return CUDA_SUCCESS;
}

CUresult cuGraphLaunch(CUgraphExec handle, CUstream stream_handle) {
  Call call(kInContext);
  const std::shared_ptr<GraphExec> exec = call ? known(call, call->execs.find(handle), "an executable graph") : nullptr;
  const std::shared_ptr<Stream> stream = call ? call.stream(stream_handle) : nullptr;
  if (!call) return call.code;
  if (stream->capture) {
    if (stream->capture->is_invalid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    auto node = std::make_shared<Node>();
    node->type = CU_GRAPH_NODE_TYPE_GRAPH;
    node->after = stream->tail;
    node->child = std::make_shared<Graph>(exec->graph);
    // A copy has nodes of its own.
    for (auto& inner : node->child->nodes) {
      inner = std::make_shared<Node>(*inner);
      inner->handle = nullptr;
      inner->child_handle = nullptr;
    }
    stream->tail = {node.get()};
    stream->capture->graph->nodes.push_back(std::move(node));
    return CUDA_SUCCESS;
  }
  Work work;
  work.run = [exec] { return run_nodes(exec->graph); };
  work.is_host_function = std::any_of(exec->graph.nodes.begin(), exec->graph.nodes.end(),
                                      [](const auto& node) { return node->type == CU_GRAPH_NODE_TYPE_HOST; });
  if (exec->last != nullptr && !exec->last->is_done) work.after.push_back(exec->last);
  exec->last = call->enqueue(call.lock, stream, std::move(work));
  return CUDA_SUCCESS;
}

CUresult cuGraphExecDestroy(CUgraphExec handle) {
  Call call(kInContext);
  const std::shared_ptr<GraphExec> exec = call ? known(call, call->execs.find(handle), "an executable graph") : nullptr;
  if (call) call->execs.remove(handle);  // a replay in flight keeps it
  return call.code;
}

// ---- nodes ----

CUresult cuGraphGetNodes(CUgraph handle, CUgraphNode* nodes, std::size_t* count) {
  Call call(kAnywhere);
  const std::shared_ptr<Graph> graph = call ? known(call, call->graphs.find(handle), "a graph") : nullptr;
  if (!call) return call.code;
  if (nodes != nullptr) {
    for (std::size_t i = 0; i < *count; ++i) nodes[i] = i < graph->nodes.size() ? graph->nodes[i]->handle : nullptr;
    *count = std::min(*count, graph->nodes.size());
  } else {
    *count = graph->nodes.size();
  }
  return CUDA_SUCCESS;
}

CUresult cuGraphNodeGetType(CUgraphNode handle, CUgraphNodeType* type) {
  Call call(kAnywhere);
  const std::shared_ptr<Node> node = call ? known(call, call->nodes.find(handle), "a node") : nullptr;
  if (call) *type = node->type;
  return call.code;
}

CUresult cuGraphKernelNodeGetParams(CUgraphNode handle, CUDA_KERNEL_NODE_PARAMS* params) {
  Call call(kAnywhere);
  const std::shared_ptr<Node> node = call ? known(call, call->nodes.find(handle), "a node") : nullptr;
  if (!call) return call.code;
  if (node->type != CU_GRAPH_NODE_TYPE_KERNEL) return CUDA_ERROR_INVALID_VALUE;
  const KernelCall& kernel = *node->kernel;
  *params = {};
  if (call->options.nodes_have_kernels) {
    params->kern = reinterpret_cast<CUkernel>(kernel.handle);
  } else {
    params->func = kernel.handle;
  }
  params->gridDimX = kernel.grid.x;
  params->gridDimY = kernel.grid.y;
  params->gridDimZ = kernel.grid.z;
  params->blockDimX = kernel.block.x;
  params->blockDimY = kernel.block.y;
  params->blockDimZ = kernel.block.z;
  params->sharedMemBytes = kernel.shared_bytes;
  params->kernelParams = const_cast<void**>(kernel.params.data());
  params->ctx = kernel.context;
  return CUDA_SUCCESS;
}

CUresult cuGraphChildGraphNodeGetGraph(CUgraphNode handle, CUgraph* graph) {
  Call call(kAnywhere);
  const std::shared_ptr<Node> node = call ? known(call, call->nodes.find(handle), "a node") : nullptr;
  if (!call) return call.code;
  if (node->type != CU_GRAPH_NODE_TYPE_GRAPH) return CUDA_ERROR_INVALID_VALUE;
  *graph = node->child_handle;
  return CUDA_SUCCESS;
}

// ---- user objects ----

CUresult cuUserObjectCreate(CUuserObject* handle, void* data, CUhostFn destroy, unsigned references, unsigned flags) {
  Call call(kAnywhere);
  if (!call) return call.code;
  if (destroy == nullptr || references == 0 || references > INT32_MAX || flags != CU_USER_OBJECT_NO_DESTRUCTOR_SYNC)
    return CUDA_ERROR_INVALID_VALUE;
  *handle = call->user_objects.add(std::make_shared<UserObject>(call->janitor, destroy, data, references));
  return CUDA_SUCCESS;
}

CUresult cuUserObjectRelease(CUuserObject handle, unsigned count) {
  Call call(kAnywhere);
  const std::shared_ptr<UserObject> object = call ? known(call, call->user_objects.find(handle), "a user object") : nullptr;
  if (!call) return call.code;
  if (count == 0 || count > object->num_references) return CUDA_ERROR_INVALID_VALUE;
  object->num_references -= count;
  if (object->num_references == 0) call->user_objects.remove(handle);
  return CUDA_SUCCESS;
}

CUresult cuGraphRetainUserObject(CUgraph graph_handle, CUuserObject handle, unsigned count, unsigned flags) {
  Call call(kAnywhere);
  const std::shared_ptr<Graph> graph = call ? known(call, call->graphs.find(graph_handle), "a graph") : nullptr;
  const std::shared_ptr<UserObject> object = call ? known(call, call->user_objects.find(handle), "a user object") : nullptr;
  if (!call) return call.code;
  if (count == 0 || (flags & ~1U) != 0) return CUDA_ERROR_INVALID_VALUE;
  if (flags == CU_GRAPH_USER_OBJECT_MOVE) {
    if (count > object->num_references) return CUDA_ERROR_INVALID_VALUE;
    object->num_references -= count;
    if (object->num_references == 0) call->user_objects.remove(handle);
  }
  graph->objects.push_back(object);
  return CUDA_SUCCESS;
}

}  // namespace api
}  // namespace metrale::fake_cuda
