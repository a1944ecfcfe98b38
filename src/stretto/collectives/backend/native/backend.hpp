// SPDX-License-Identifier: Apache-2.0
// The c10d::Backend "stretto": asks a Python callable (dispatcher.py) whether a schedule runs a call, and otherwise
// calls an inner backend: gloo for CPU tensors, and NCCL for CUDA tensors if the machine has GPUs.
#pragma once

#include <algorithm>
#include <atomic>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

#include "fast_calls.hpp"
#include "work.hpp"

namespace stretto {

using c10::intrusive_ptr;
using c10d::Backend;
using c10d::Work;
using Tensors = std::vector<at::Tensor>;
// How long calls that have started may still take when the group is destroyed.
constexpr double kSecondsToEnd = 5;

using Milliseconds = std::chrono::milliseconds;

struct StrettoOptions : Backend::Options {
  explicit StrettoOptions(Milliseconds timeout) : Backend::Options("stretto", timeout) {}
};

inline const char* name_of(const c10d::ReduceOp& reduction) {
  switch (reduction.op_) {
    case c10d::ReduceOp::SUM:
      return "sum";
    case c10d::ReduceOp::AVG:
      return "avg";
    case c10d::ReduceOp::PRODUCT:
      return "prod";
    case c10d::ReduceOp::MIN:
      return "min";
    case c10d::ReduceOp::MAX:
      return "max";
    default:
      return "another";
  }
}

class StrettoBackend : public Backend {
 public:
  // dispatch(operation, outputs, inputs, reduction, root, milliseconds, note, is_async) -> Work or None; note:
  // "coalescing", "even sizes", "uneven sizes" (of an all-to-all that is given sizes or lists), "cuda" (where no tensor
  // shows it), "root tensor" (of a broadcast or a reduce whose root's tensor is not the first of its list), or "".
  // split(store, rank, ranks, name, milliseconds) -> a StrettoBackend of those ranks, or None on a rank outside.
  // fast: what runs calls without `dispatch`, which fills it.
  StrettoBackend(
      int rank,
      int size,
      intrusive_ptr<Backend> cpu,
      intrusive_ptr<Backend> cuda,
      py::object dispatch,
      py::object split,
      intrusive_ptr<StrettoOptions> options,
      std::shared_ptr<FastCalls> fast)
      : Backend(rank, size),
        fast_(std::move(fast)),
        cpu_(std::move(cpu)),
        cuda_(std::move(cuda)),
        dispatch_(std::move(dispatch)),
        split_(std::move(split)),
        options_(std::move(options)) {
    init();
  }

  // gloo's destructor joins threads that take the GIL to drop the last reference to a tensor (torch 2.15), so the inner
  // backends are dropped without it, and after the Python objects that refer to them.
  ~StrettoBackend() override {
    dispatch_.drop();
    split_.drop();
    std::optional<py::gil_scoped_release> release;
    if (Py_IsInitialized() && PyGILState_Check()) {
      release.emplace();
    }
    cuda_.reset();
    cpu_.reset();
  }

  // With the GIL held.
  py::object dispatch() {
    return dispatch_.get();
  }

  intrusive_ptr<StrettoOptions> options() {
    return options_;
  }

  intrusive_ptr<Backend> inner(at::DeviceType device) {
    if (device == at::kCPU) {
      return cpu_;
    }
    TORCH_CHECK_VALUE(
        cuda_,
        "this group of the backend stretto has nothing to run a call on " + at::Device(device).str() +
            " tensors: there is no GPU");
    if (bound_device_id_ && !cuda_->getBoundDeviceId()) {
      cuda_->setBoundDeviceId(bound_device_id_);
    }
    return cuda_;
  }

  const std::string getBackendName() const override {
    return "stretto";
  }

  intrusive_ptr<Backend::Options> getBackendOptions() override {
    return options_;
  }

  // ------------------------------------------------------------------------ calls that a schedule may run

  intrusive_ptr<Work> broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override {
    const char* note = note_of_root(opts.rootTensor);
    auto work = start_schedule("broadcast", tensors, tensors, "", opts.rootRank, opts, note);
    return work ? work : kept(tensors, inner_of(tensors)->broadcast(tensors, opts));
  }

  intrusive_ptr<Work> allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    auto work = start_schedule("allreduce", tensors, tensors, name_of(opts.reduceOp), 0, opts);
    return work ? work : kept(tensors, inner_of(tensors)->allreduce(tensors, opts));
  }

  intrusive_ptr<Work> allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) override {
    auto work = start_schedule("allreduce_coalesced", tensors, tensors, name_of(opts.reduceOp), 0, opts);
    return work ? work : kept(tensors, inner_of(tensors)->allreduce_coalesced(tensors, opts));
  }

  intrusive_ptr<Work> reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override {
    const char* note = note_of_root(opts.rootTensor);
    auto work = start_schedule("reduce", tensors, tensors, name_of(opts.reduceOp), opts.rootRank, opts, note);
    return work ? work : kept(tensors, inner_of(tensors)->reduce(tensors, opts));
  }

  intrusive_ptr<Work> allgather(
      std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override {
    auto work = start_schedule("allgather", first_of(outputs), inputs, "", 0, opts);
    return work ? work : kept(inputs, inner_of(inputs)->allgather(outputs, inputs, opts));
  }

  intrusive_ptr<Work> _allgather_base(
      at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) override {
    auto work = start_schedule("_allgather_base", {output}, {input}, "", 0, opts);
    return work ? work : kept({input}, inner_of({input})->_allgather_base(output, input, opts));
  }

  intrusive_ptr<Work> allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override {
    auto work = start_schedule("allgather_into_tensor_coalesced", outputs, inputs, "", 0, opts);
    return work ? work : kept(inputs, inner_of(inputs)->allgather_into_tensor_coalesced(outputs, inputs, opts));
  }

  intrusive_ptr<Work> reduce_scatter(
      Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& opts) override {
    auto work = start_schedule("reduce_scatter", outputs, first_of(inputs), name_of(opts.reduceOp), 0, opts);
    return work ? work : kept(outputs, inner_of(outputs)->reduce_scatter(outputs, inputs, opts));
  }

  intrusive_ptr<Work> _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts) override {
    auto work = start_schedule("_reduce_scatter_base", {output}, {input}, name_of(opts.reduceOp), 0, opts);
    return work ? work : kept({input}, inner_of({input})->_reduce_scatter_base(output, input, opts));
  }

  intrusive_ptr<Work> reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& opts) override {
    auto work =
        start_schedule("reduce_scatter_tensor_coalesced", outputs, inputs, name_of(opts.reduceOp), 0, opts);
    return work ? work : kept(inputs, inner_of(inputs)->reduce_scatter_tensor_coalesced(outputs, inputs, opts));
  }

  intrusive_ptr<Work> alltoall_base(
      at::Tensor& output,
      at::Tensor& input,
      std::vector<int64_t>& output_sizes,
      std::vector<int64_t>& input_sizes,
      const c10d::AllToAllOptions& opts) override {
    for (const auto* sizes : {&output_sizes, &input_sizes}) {
      for (const int64_t rows : *sizes) {
        TORCH_CHECK_VALUE(rows >= 0, "a split size of all_to_all_single is ", rows, ", but must be at least 0");
      }
    }
    const char* note = output_sizes.empty() && input_sizes.empty() ? ""
        : is_even(output_sizes) && is_even(input_sizes)            ? "even sizes"
                                                                   : "uneven sizes";
    auto work = start_schedule("alltoall_base", {output}, {input}, "", 0, opts, note);
    return work ? work
                : kept({input}, inner_of({input})->alltoall_base(output, input, output_sizes, input_sizes, opts));
  }

  intrusive_ptr<Work> alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) override {
    const char* note = is_even(sizes_of(outputs)) && is_even(sizes_of(inputs)) ? "even sizes" : "uneven sizes";
    auto work = start_schedule("alltoall", outputs, inputs, "", 0, opts, note);
    return work ? work : kept(inputs, inner_of(inputs)->alltoall(outputs, inputs, opts));
  }

  // ------------------------------------------------------------------------ calls that inner backends run

  intrusive_ptr<Work> allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    count_collective("allreduce_sparse", tensors);
    return kept(tensors, inner_of(tensors)->allreduce_sparse(tensors, opts));
  }

  intrusive_ptr<Work> allgather_coalesced(
      std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override {
    count_collective("allgather_coalesced", inputs);
    return kept(inputs, inner_of(inputs)->allgather_coalesced(outputs, inputs, opts));
  }

  intrusive_ptr<Work> gather(
      std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& opts) override {
    count_collective("gather", inputs);
    return kept(inputs, inner_of(inputs)->gather(outputs, inputs, opts));
  }

  intrusive_ptr<Work> scatter(
      Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& opts) override {
    count_collective("scatter", outputs);
    if (inner_of(outputs) != cpu_) {
      return kept(outputs, inner_of(outputs)->scatter(outputs, inputs, opts));
    }
    // gloo ignores the strides of what it sends, such as of an expanded gradient. Its Work keeps the copies.
    auto sent = inputs;
    for (auto& tensors : sent) {
      for (auto& tensor : tensors) {
        tensor = tensor.contiguous();
      }
    }
    return kept(outputs, cpu_->scatter(outputs, sent, opts));
  }

  intrusive_ptr<Work> send(Tensors& tensors, int to, int tag) override {
    require_rank("send to", to);
    count_message("send", tensors);
    return kept(tensors, inner_of(tensors)->send(tensors, to, tag));
  }

  intrusive_ptr<Work> recv(Tensors& tensors, int from, int tag) override {
    require_rank("receive from", from);
    count_message("recv", tensors);
    return kept(tensors, inner_of(tensors)->recv(tensors, from, tag));
  }

  intrusive_ptr<Work> recvAnysource(Tensors& tensors, int tag) override {
    count_message("recv_anysource", tensors);
    return kept(tensors, inner_of(tensors)->recvAnysource(tensors, tag));
  }

  intrusive_ptr<Work> barrier(const c10d::BarrierOptions& opts) override {
    const bool on_gpu = cuda_ && (!opts.device_ids.empty() || (opts.device && opts.device->is_cuda()));
    start_schedule("barrier", {}, {}, "", 0, opts, on_gpu ? "cuda" : "");
    begin_barrier(on_gpu, opts.asyncOp);
    if (cuda_ && !on_gpu && !opts.asyncOp) {
      warm_up_nccl_if_ready();
    }
    auto work = inner(on_gpu ? at::kCUDA : at::kCPU)->barrier(opts);
    return on_gpu ? work : after_schedules(work);
  }

  void monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_for_all) override {
    count_message("monitored_barrier", {});
    begin_barrier(false, false);
    cpu_->monitoredBarrier(opts, wait_for_all);
  }

  // ------------------------------------------------------------------------ what NCCL has and gloo lacks

  bool supportsCoalescing() const override {
    return cuda_ && cuda_->supportsCoalescing();
  }

  void startCoalescing() override {
    inner(at::kCUDA)->startCoalescing();
    coalescing_ = true;
  }

  // A batch may also have calls that gloo runs (batch_isend_irecv of CPU tensors), which NCCL's Work knows nothing of.
  intrusive_ptr<Work> endCoalescing() override {
    coalescing_ = false;
    auto works = std::exchange(batch_, {});
    if (auto work = inner(at::kCUDA)->endCoalescing()) {
      works.push_back(std::move(work));
    }
    if (works.size() > 1) {
      return c10::make_intrusive<SeveralWorks>(std::move(works));
    }
    return works.empty() ? nullptr : works.front();
  }

  bool supportsTimeEstimation() const override {
    return cuda_ && cuda_->supportsTimeEstimation();
  }

  void eagerConnectSingleDevice(at::Device device) override {
    if (cuda_ && device.is_cuda()) {
      cuda_->setBoundDeviceId(device);
      cuda_->eagerConnectSingleDevice(device);
    }
  }

  c10d::ErrorType getError() override {
    return cuda_ ? cuda_->getError() : c10d::ErrorType::SUCCESS;
  }

  std::shared_ptr<c10::Allocator> getMemAllocator() override {
    return inner(at::kCUDA)->getMemAllocator();
  }

  bool supportsTensorAlloc(c10::DeviceIndex index) override {
    return cuda_ && cuda_->supportsTensorAlloc(index);
  }

  at::Tensor allocateTensor(long size, at::TensorOptions options) override {
    return inner(at::kCUDA)->allocateTensor(size, options);
  }

  void registerOnCompletionHook(std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) override {
    cuda_ ? cuda_->registerOnCompletionHook(std::move(hook)) : Backend::registerOnCompletionHook(std::move(hook));
  }

  void waitForPendingWorks() override {
    cuda_ ? cuda_->waitForPendingWorks() : Backend::waitForPendingWorks();
  }

  void enableCollectivesTiming() override {
    each([](Backend& backend) { backend.enableCollectivesTiming(); });
  }

  // ------------------------------------------------------------------------ the group's life

  bool supportsSplitting() const override {
    return true;
  }

  // torch splits once for each device type of the group; this one backend serves all of them.
  intrusive_ptr<Backend> split(
      const intrusive_ptr<c10d::Store>& store,
      const std::vector<int>& ranks,
      const intrusive_ptr<Backend::Options>& opts) override {
    if (!opts->group_name.empty() && opts->group_name == last_split_name_) {
      if (auto known = last_split_.lock()) {
        return known;
      }
    }
    py::gil_scoped_acquire gil;
    auto made = split_.get()(store, rank_, ranks, opts->group_name, opts->timeout.count());
    if (made.is_none()) {
      return nullptr;
    }
    auto backend = made.cast<intrusive_ptr<Backend>>();
    last_split_name_ = opts->group_name;
    last_split_ = c10::weak_intrusive_ptr<Backend>(backend);
    return backend;
  }

  void setTimeout(Milliseconds timeout) override {
    options_->timeout = timeout;
    each([timeout](Backend& backend) { backend.setTimeout(timeout); });
  }

  void setGroupUid(const std::string& uid) override {
    Backend::setGroupUid(uid);
    each([&uid](Backend& backend) { backend.setGroupUid(uid); });
  }

  void setSequenceNumberForGroup() override {
    each([](Backend& backend) { backend.setSequenceNumberForGroup(); });
  }

  // Counts only collectives, whatever runs them. torch's detailed checks compare it between ranks; gloo's own number
  // also counts messages that only some ranks send, as in a monitored barrier, where rank 0 sends more than others.
  uint64_t getSequenceNumberForGroup() override {
    return sequence_number_;
  }

  void abort() override {
    close(0);
    each([](Backend& backend) { backend.abort(); });
  }

  void shutdown() override {
    close(kSecondsToEnd);
    each([](Backend& backend) { backend.shutdown(); });
  }

 private:
  static bool is_even(const std::vector<int64_t>& sizes) {
    return std::all_of(sizes.begin(), sizes.end(), [&sizes](int64_t size) { return size == sizes.front(); });
  }

  // gloo waits for a rank that is not there until the time limit, or crashes.
  void require_rank(const char* what, int rank) const {
    TORCH_CHECK_VALUE(
        0 <= rank && rank < size_, what, " rank ", rank, " of a group that has ranks 0 to ", size_ - 1);
  }

  static std::vector<int64_t> sizes_of(const Tensors& tensors) {
    std::vector<int64_t> sizes;
    for (const auto& tensor : tensors) {
      sizes.push_back(tensor.numel());
    }
    return sizes;
  }

  static const char* note_of_root(int64_t tensor) {
    return tensor == 0 ? "" : "root tensor";
  }

  static Tensors first_of(const std::vector<Tensors>& lists) {
    return lists.size() == 1 ? lists.front() : Tensors{};
  }

  intrusive_ptr<Backend> inner_of(const Tensors& tensors) {
    return inner(tensors.empty() ? at::kCPU : tensors.front().device().type());
  }

  // Of a call that an inner backend runs: where torch coalesces calls, it takes no Work but that of `endCoalescing`.
  intrusive_ptr<Work> kept(const Tensors& tensors, intrusive_ptr<Work> work) {
    if (coalescing_ && work && inner_of(tensors) == cpu_) {
      batch_.push_back(work);
    }
    return work;
  }

  template <typename Function>
  void each(const Function& function) {
    function(*cpu_);
    if (cuda_) {
      function(*cuda_);
    }
  }

  // The Work of a schedule that runs the call, or null: the inner backend is to run it.
  template <typename Options>
  intrusive_ptr<Work> start_schedule(
      const char* operation,
      const Tensors& outputs,
      const Tensors& inputs,
      const char* reduction,
      int64_t root,
      const Options& opts,
      const char* note = "") {
    ++sequence_number_;
    return call_dispatcher(operation, outputs, inputs, reduction, root, opts.timeout, note, opts.asyncOp);
  }

  intrusive_ptr<Work> call_dispatcher(
      const char* operation,
      const Tensors& outputs,
      const Tensors& inputs,
      const char* reduction,
      int64_t root,
      Milliseconds timeout,
      const char* note,
      bool is_async) {
    const auto limit = timeout.count() > 0 ? timeout : options_->timeout;
    if (!coalescing_ && !*note) {
      auto known = fast_->start(operation, outputs, inputs, reduction, root, limit.count(), is_async);
      if (known.is_known) {
        return std::move(known.work);
      }
    }
    py::gil_scoped_acquire gil;
    const char* sent_note = coalescing_ ? "coalescing" : note;
    auto answer = dispatch_.get()(operation, outputs, inputs, reduction, root, limit.count(), sent_note, is_async);
    return answer.is_none() ? nullptr : answer.cast<intrusive_ptr<Work>>();
  }

  // For collectives that the inner backend always runs: the dispatcher checks, counts and logs them.
  void count_collective(const char* operation, const Tensors& tensors) {
    ++sequence_number_;
    count_message(operation, tensors);
  }

  // For messages and other operations that not all ranks of the group call: they have no sequence number.
  void count_message(const char* operation, const Tensors& tensors) {
    call_dispatcher(operation, tensors, tensors, "", 0, Milliseconds(0), "", false);
  }

  // Inner backends' barriers know nothing of schedules that run on the GPU: those end first.
  void begin_barrier(bool on_gpu, bool is_async) {
    py::gil_scoped_acquire gil;
    dispatch_.get().attr("begin_barrier")(on_gpu, is_async);
  }

  // gloo's barrier waits for gloo's earlier calls; this also waits for earlier schedules, which gloo does not know.
  intrusive_ptr<Work> after_schedules(const intrusive_ptr<Work>& barrier) {
    py::gil_scoped_acquire gil;
    return dispatch_.get().attr("after_schedules")(barrier).cast<intrusive_ptr<Work>>();
  }

  // A synchronous barrier waits for all ranks, so NCCL can connect here.
  void warm_up_nccl_if_ready() {
    py::gil_scoped_acquire gil;
    dispatch_.get().attr("warm_up_nccl_if_ready")();
  }

  void close(double seconds) {
    if (Py_IsInitialized()) {
      py::gil_scoped_acquire gil;
      dispatch_.get().attr("close")(seconds);
    }
  }

  std::shared_ptr<FastCalls> fast_;
  intrusive_ptr<Backend> cpu_;
  intrusive_ptr<Backend> cuda_;
  OwnedPyObject dispatch_;
  OwnedPyObject split_;
  intrusive_ptr<StrettoOptions> options_;
  std::atomic<uint64_t> sequence_number_{0};
  bool coalescing_ = false;
  std::vector<intrusive_ptr<Work>> batch_;
  std::string last_split_name_;
  c10::weak_intrusive_ptr<Backend> last_split_{intrusive_ptr<Backend>()};
};

} // namespace stretto
