// SPDX-License-Identifier: Apache-2.0
// Calls that were made before, launched again without Python.
//
// The first call of a kind (operation, dtype, sizes, reduction, root, place of input and output) goes through the
// dispatcher, which remembers here what it launched: one kernel and its parameters, of which only the addresses of input
// and output differ from call to call. Later calls of the kind write these and launch. Host time of a small call is
// thus a third of what it is through Python (docs/backend.md).
//
// Everything else still goes through the dispatcher: calls of other kinds, on streams that are not known yet, with
// another time limit, the first one after the process has loaded a kernel, whose limit is longer, while a CUDA graph is
// captured, and while the dispatcher is busy with a call (`hold`). The two
// paths tell each other where the group's last call ends, so that calls on different streams keep their order.
#pragma once

#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "range.hpp"
#include "work.hpp"

namespace stretto {

// The driver's functions, by their addresses: no header of CUDA is needed to compile this.
using LaunchKernel =
    int (*)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**);
using IsCapturing = int (*)(void*, int*);

class FastCalls {
 public:
  struct Answer {
    bool is_known = false;
    c10::intrusive_ptr<c10d::Work> work;  // null: the inner backend is to run the call
  };

  // rank: in the group. device: of the tensors. launch, is_capturing: addresses of cuLaunchKernel and
  // cuStreamIsCapturing. group_stream: torch's number of the stream that asynchronous calls run on, and its handle.
  // loaded: the address of the number of kernels that the process has loaded (stretto.memory.compilation).
  void open(
      int rank,
      c10::Device device,
      uint64_t launch,
      uint64_t is_capturing,
      int64_t group_stream,
      uint64_t group_handle,
      uint64_t loaded) {
    const auto lock = locked();
    rank_ = rank;
    device_ = device;
    launch_ = reinterpret_cast<LaunchKernel>(launch);
    is_capturing_ = reinterpret_cast<IsCapturing>(is_capturing);
    group_stream_.emplace(c10::Stream::UNSAFE, *device_, group_stream);
    handles_[group_stream] = group_handle;
    loaded_ = reinterpret_cast<const volatile int64_t*>(loaded);
  }

  // Remember the launch of such calls. values: the kernel's parameters, 8 bytes each; input_at, output_at: which of them
  // are the addresses.
  void add(
      const std::string& operation,
      const std::vector<at::Tensor>& outputs,
      const std::vector<at::Tensor>& inputs,
      const std::string& reduction,
      int64_t root,
      int64_t milliseconds,
      const std::string& title,
      const std::string& ran_as,
      uint64_t function,
      unsigned blocks,
      unsigned threads,
      std::vector<uint64_t> values,
      size_t input_at,
      size_t output_at) {
    const auto lock = locked();
    const auto key = key_of(operation.c_str(), outputs, inputs, reduction.c_str(), root);
    if (!key || input_at >= values.size() || output_at >= values.size()) {
      return;
    }
    const bool is_in_place = std::get<6>(*key);
    keep(
        *key,
        Launch{
            title, ran_as, milliseconds, function, blocks, threads, std::move(values), input_at, output_at, is_in_place});
  }

  // Remember that the inner backend runs such calls.
  void add_inner(
      const std::string& operation,
      const std::vector<at::Tensor>& outputs,
      const std::vector<at::Tensor>& inputs,
      const std::string& reduction,
      int64_t root,
      const std::string& ran_as) {
    const auto lock = locked();
    if (const auto key = key_of(operation.c_str(), outputs, inputs, reduction.c_str(), root)) {
      Launch made;
      made.ran_as = ran_as;
      keep(*key, std::move(made));
    }
  }

  // Learn the handle of a stream, by torch's number of it.
  void add_stream(int64_t number, uint64_t handle) {
    const auto lock = locked();
    handles_[number] = handle;
  }

  // Forget all calls; the counts stay.
  void clear() {
    const auto lock = locked();
    forget();
  }

  // Let no call run here until `release`. Returns the stream's handle and the end of the last call, if that ran here.
  std::optional<std::pair<uint64_t, std::shared_ptr<CallEnd>>> hold() {
    const auto lock = locked();
    ++held_;
    if (!is_ahead_) {
      return std::nullopt;
    }
    is_ahead_ = false;
    return std::make_pair(last_handle_, last_end_);
  }

  // As `hold`, without asking for the last call.
  void pause() {
    const auto lock = locked();
    ++held_;
  }

  void release() {
    const auto lock = locked();
    --held_;
  }

  // Learn where the last call ends, which the dispatcher has started.
  void follow(uint64_t handle, std::shared_ptr<CallEnd> end) {
    const auto lock = locked();
    last_handle_ = handle;
    last_end_ = std::move(end);
    is_ahead_ = false;
    seen_loaded_ = *loaded_;
  }

  // (operation, what ran it, calls).
  std::vector<std::tuple<std::string, std::string, int64_t>> counts() {
    const auto lock = locked();
    move_counts();
    std::vector<std::tuple<std::string, std::string, int64_t>> found;
    for (const auto& [names, count] : counts_) {
      found.emplace_back(names.first, names.second, count);
    }
    return found;
  }

  // Run a call, without the GIL, if such a one is known and nothing stands in its way.
  Answer start(
      const char* operation,
      const std::vector<at::Tensor>& outputs,
      const std::vector<at::Tensor>& inputs,
      const char* reduction,
      int64_t root,
      int64_t milliseconds,
      bool is_async) {
    const auto lock = locked();
    if (held_ || launches_.empty() || raise_failure.is_due()) {
      return {};
    }
    const auto key = key_of(operation, outputs, inputs, reduction, root);
    const auto found = key ? launches_.find(*key) : launches_.end();
    if (found == launches_.end()) {
      return {};
    }
    Launch& launch = found->second;
    if (!launch.function) {
      ++launch.count;
      return {true, nullptr};
    }
    const c10::impl::VirtualGuardImpl guard(device_->type());
    if (seen_loaded_ != *loaded_ || launch.milliseconds != milliseconds || guard.getDevice() != *device_) {
      return {};
    }
    const c10::Stream caller = guard.getStream(*device_);
    const auto handle = handles_.find(caller.id());
    int status = 0;
    if (handle == handles_.end() || is_capturing_(reinterpret_cast<void*>(handle->second), &status) || status) {
      return {};
    }
    auto work = is_async ? launch_beside(launch, outputs, inputs, guard, caller)
                         : launch_on(launch, outputs, inputs, {}, handle->second);
    if (!work) {
      return {};  // the dispatcher tries again, and says why
    }
    ++launch.count;
    return {true, std::move(work)};
  }

 private:
  using Key = std::tuple<std::string, std::string, int64_t, int64_t, int64_t, int, bool>;
  static constexpr size_t kMostLaunches = 4096;

  struct Launch {
    std::string title;
    std::string ran_as;
    int64_t milliseconds = 0;
    uint64_t function = 0;  // 0: the inner backend
    unsigned blocks = 0;
    unsigned threads = 0;
    std::vector<uint64_t> values;
    size_t input_at = 0;
    size_t output_at = 0;
    bool is_in_place = false;
    int64_t count = 0;
  };

  // Threads that have the GIL wait without it: the one that has the mutex may wait for the GIL, or for a GPU that waits
  // for what another thread is to launch.
  std::unique_lock<std::mutex> locked() {
    std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
    if (!lock) {
      std::optional<py::gil_scoped_release> release;
      if (Py_IsInitialized() && PyGILState_Check()) {
        release.emplace();
      }
      lock.lock();
    }
    return lock;
  }

  // A kind that is known already is made anew, since the dispatcher has run such a call again: with another time limit,
  // or on a new stream.
  void keep(const Key& key, Launch launch) {
    if (launches_.size() >= kMostLaunches) {
      forget();
    }
    Launch& kept = launches_[key];
    add_counts(std::get<0>(key), kept);
    kept = std::move(launch);
  }

  void forget() {
    move_counts();
    launches_.clear();
  }

  void move_counts() {
    for (auto& [key, launch] : launches_) {
      add_counts(std::get<0>(key), launch);
    }
  }

  void add_counts(const std::string& operation, Launch& launch) {
    if (launch.count) {
      counts_[{operation, launch.ran_as}] += launch.count;
      launch.count = 0;
    }
  }

  // What calls of one kind have in common; none for tensors that the dispatcher has to look at. The last part says
  // whether input and output are the same memory, or one is this rank's part of the other.
  std::optional<Key> key_of(
      const char* operation,
      const std::vector<at::Tensor>& outputs,
      const std::vector<at::Tensor>& inputs,
      const char* reduction,
      int64_t root) const {
    if (!device_ || inputs.size() != 1 || outputs.size() != 1) {
      return std::nullopt;
    }
    const at::Tensor& input = inputs[0];
    const at::Tensor& output = outputs[0];
    for (const at::Tensor* each : {&input, &output}) {
      if (!each->defined() || each->unsafeGetTensorImpl()->is_python_dispatch()) {
        return std::nullopt;  // a subclass that answers in Python has no memory of its own
      }
      if (each->layout() != at::kStrided || each->device() != *device_ ||
          each->scalar_type() != input.scalar_type() || !each->is_contiguous() || each->numel() == 0) {
        return std::nullopt;
      }
    }
    const at::Tensor& larger = output.numel() >= input.numel() ? output : input;
    const at::Tensor& smaller = output.numel() >= input.numel() ? input : output;
    const auto start = reinterpret_cast<uintptr_t>(larger.data_ptr());
    const auto inner = reinterpret_cast<uintptr_t>(smaller.data_ptr());
    const bool is_part = larger.numel() != smaller.numel();
    const bool is_in_place = inner == start + (is_part ? rank_ * smaller.nbytes() : 0);
    const bool keeps_input = std::strstr(operation, "reduce_scatter") || std::strstr(operation, "alltoall");
    if (is_in_place ? keeps_input : inner < start + larger.nbytes() && start < inner + smaller.nbytes()) {
      return std::nullopt;
    }
    return Key{
        operation, reduction, root, input.numel(), output.numel(), static_cast<int>(input.scalar_type()), is_in_place};
  }

  // Launch on the stream of that handle, which is the current one. Null if CUDA refuses.
  c10::intrusive_ptr<c10d::Work> launch_on(
      Launch& launch,
      const std::vector<at::Tensor>& outputs,
      const std::vector<at::Tensor>& inputs,
      std::vector<at::Tensor> kept,
      uint64_t handle) {
    if (handle != last_handle_) {
      if (!last_end_) {
        return nullptr;
      }
      last_end_->wait();
    }
    const bool is_larger = outputs[0].numel() >= inputs[0].numel();
    const auto output = reinterpret_cast<uint64_t>(outputs[0].data_ptr());
    const auto input = reinterpret_cast<uint64_t>(inputs[0].data_ptr());
    const bool is_in_place = launch.is_in_place;
    launch.values[launch.input_at] = is_in_place ? (is_larger ? output : input) : input;
    launch.values[launch.output_at] = is_in_place ? (is_larger ? output : input) : output;
    pointers_.resize(launch.values.size());
    for (size_t index = 0; index < launch.values.size(); ++index) {
      pointers_[index] = &launch.values[index];
    }
    Range range("stretto:" + launch.title, inputs);
    const int error = launch_(
        reinterpret_cast<void*>(launch.function),
        launch.blocks,
        1,
        1,
        launch.threads,
        1,
        1,
        0,
        reinterpret_cast<void*>(handle),
        pointers_.data(),
        nullptr);
    range.end();
    if (error) {
      return nullptr;
    }
    auto work = c10::make_intrusive<EnqueuedWork>(rank_, launch.title, outputs, std::move(kept));
    last_handle_ = handle;
    last_end_ = work->end();
    is_ahead_ = true;
    return work;
  }

  // Launch on the group's stream, after what the caller's stream has.
  c10::intrusive_ptr<c10d::Work> launch_beside(
      Launch& launch,
      const std::vector<at::Tensor>& outputs,
      const std::vector<at::Tensor>& inputs,
      const c10::impl::VirtualGuardImpl& guard,
      c10::Stream caller) {
    c10::Event event(device_->type());
    event.record(caller);
    event.block(*group_stream_);
    guard.exchangeStream(*group_stream_);
    c10::intrusive_ptr<c10d::Work> work;
    try {
      work = launch_on(launch, outputs, inputs, {inputs[0], outputs[0]}, handles_.at(group_stream_->id()));
    } catch (...) {
      guard.exchangeStream(caller);
      throw;
    }
    guard.exchangeStream(caller);
    return work;
  }

  std::mutex mutex_;
  int rank_ = 0;
  std::optional<c10::Device> device_;
  LaunchKernel launch_ = nullptr;
  IsCapturing is_capturing_ = nullptr;
  const volatile int64_t* loaded_ = nullptr;
  int64_t seen_loaded_ = 0;
  std::optional<c10::Stream> group_stream_;
  std::unordered_map<int64_t, uint64_t> handles_;
  std::map<Key, Launch> launches_;
  std::map<std::pair<std::string, std::string>, int64_t> counts_;
  std::vector<void*> pointers_;
  int held_ = 0;
  bool is_ahead_ = false;
  uint64_t last_handle_ = ~uint64_t{0};
  std::shared_ptr<CallEnd> last_end_;
};

} // namespace stretto
