// SPDX-License-Identifier: Apache-2.0
// The Works of calls that schedules run: a worker thread ends those on the host, a stream those on a GPU.
#pragma once

#include <algorithm>
#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/utils/pybind.h>

namespace stretto {

namespace py = pybind11;

// Messages are strings before torch sees them: a compiler that links a C++ library of its own gives this module tables of
// locales that are not the process's, and a number that is written to a stream ends the process.
inline std::string not_ended(const std::string& operation, std::chrono::milliseconds timeout) {
  return operation + ": the schedule has not ended within " + std::to_string(timeout.count()) + " ms";
}

// A Python object that any thread may drop, even after the interpreter has ended.
class OwnedPyObject {
 public:
  explicit OwnedPyObject(py::object object = py::none()) : object_(std::move(object)) {}
  OwnedPyObject(const OwnedPyObject&) = delete;
  OwnedPyObject& operator=(const OwnedPyObject&) = delete;
  ~OwnedPyObject() {
    drop();
  }
  void drop() {
    if (!Py_IsInitialized()) {
      object_.release();
      return;
    }
    py::gil_scoped_acquire gil;
    object_ = py::object();
  }
  // With the GIL held.
  py::object& get() { return object_; }

 private:
  py::object object_;
};

// Raises PeerError if a wait of this process for another rank has failed: stretto.memory.failures. Without a failure it
// reads one word. The word lies in the table of failure records, which does not exist before the first workspace.
struct FailureCheck {
  const volatile int32_t* summary = nullptr;
  py::object* check = nullptr;  // never freed: Works may outlive the interpreter's modules

  // Whether a wait may have failed. Without the GIL.
  bool is_due() const {
    return summary && *summary;
  }

  void operator()() const {
    if (is_due() && Py_IsInitialized()) {
      py::gil_scoped_acquire gil;
      (*check)();
    }
  }
};

inline FailureCheck raise_failure;

class ScheduledWork : public c10d::Work {
 public:
  // inputs: those of its range in profiles. None for a barrier, of which the inner backend's barrier has a range already.
  ScheduledWork(
      int rank, const std::string& operation, std::vector<at::Tensor> outputs, const std::vector<at::Tensor>& inputs)
      : c10d::Work(
            rank,
            c10d::OpType::UNKNOWN,
            inputs.empty() ? nullptr : ("stretto:" + operation).c_str(),
            std::optional(inputs)),
        operation_(operation),
        outputs_(std::move(outputs)) {}

  // Called once by the thread that ran the schedule, without the GIL.
  void succeed() {
    finish();
    complete_future();
  }

  // Like `succeed`, with the Python exception that every `wait` raises. The GIL is held on entry.
  void fail(py::object error) {
    auto text = py::str(py::type::of(error).attr("__name__")).cast<std::string>() + ": " +
        py::str(error).cast<std::string>();
    error_ = std::make_unique<OwnedPyObject>(std::move(error));
    py::gil_scoped_release release;
    finish(std::make_exception_ptr(std::runtime_error(text)));
    complete_future();
  }

  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override {
    {
      // Callers from C++ may hold the GIL, which the running thread needs.
      std::optional<py::gil_scoped_release> release;
      if (PyGILState_Check()) {
        release.emplace();
      }
      std::unique_lock<std::mutex> lock(mutex_);
      if (timeout == kNoTimeout) {
        cv_.wait(lock, [this] { return completed_; });
      } else if (!cv_.wait_for(lock, timeout, [this] { return completed_; })) {
        TORCH_CHECK_WITH(DistBackendError, false, not_ended(operation_, timeout));
      }
      lock.unlock();
      await_future();
    }
    if (error_) {
      py::gil_scoped_acquire gil;
      PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error_->get().ptr())), error_->get().ptr());
      throw py::error_already_set();
    }
    raise_failure();
    return true;
  }

  bool isCompleted() override {
    raise_failure();
    return c10d::Work::isCompleted();
  }

  std::vector<at::Tensor> result() override {
    return outputs_;
  }

  // A thread of its own completes the future: a callback may wait for a later call, which the worker thread runs.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    std::unique_lock<std::mutex> lock(future_mutex_);
    if (!future_) {
      future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
      if (c10d::Work::isCompleted()) {
        settle(future_, exception(), outputs_);
      }
    }
    return future_;
  }

 private:
  // After `wait` the future has its value, as with gloo. Within a callback of the future it has one already.
  void await_future() {
    std::unique_lock<std::mutex> lock(future_mutex_);
    if (auto future = future_) {
      lock.unlock();
      future->wait();
    }
  }

  static void settle(
      const c10::intrusive_ptr<c10::ivalue::Future>& future,
      const std::exception_ptr& error,
      const std::vector<at::Tensor>& outputs) {
    if (future->completed()) {
      return;
    }
    if (error) {
      future->setError(error);
    } else {
      future->markCompleted(c10::IValue(outputs));
    }
  }

  void complete_future() {
    std::unique_lock<std::mutex> lock(future_mutex_);
    if (future_ && !future_->completed()) {
      std::thread([future = future_, error = exception(), outputs = outputs_] {
        settle(future, error, outputs);
      }).detach();
    }
  }

  std::string operation_;
  std::vector<at::Tensor> outputs_;
  std::unique_ptr<OwnedPyObject> error_;
  std::mutex future_mutex_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// When the GPU has done what the current stream had at a call's end. Methods are those of torch.cuda.Event.
class CallEnd {
 public:
  explicit CallEnd(c10::Device device)
      : device_(device), guard_(device.type()), stream_(guard_.getStream(device)), event_(device.type()) {
    event_.record(stream_);
  }

  // Make the current stream wait for it.
  void wait() const { event_.block(guard_.getStream(device_)); }

  bool query() const { return event_.query(); }

  // Without the GIL: the host waits.
  void synchronize() const { event_.synchronize(); }

  // Have the caching allocator reuse this tensor's memory only after what the call's stream has so far.
  void keep_memory_of(const at::Tensor& tensor) const {
    if (tensor.has_storage()) {
      guard_.recordDataPtrOnStream(tensor.storage().data_ptr(), stream_);
    }
  }

 private:
  c10::Device device_;
  c10::impl::VirtualGuardImpl guard_;
  c10::Stream stream_;
  c10::Event event_;
};

// A call whose kernels have been enqueued on the current stream, which is the group's for async_op=True. As with NCCL,
// `wait` makes the caller's stream wait for this call alone, not the host, and the Work is completed once the GPU has
// run the kernels. A `wait` with a time limit of its own makes the host wait too.
//
// tensors: the caller's, of a call on the group's stream. The caching allocator knows nothing of that stream, so the Work
// keeps them until `wait` has put the caller's stream behind the call; if nobody waits, the allocator gets to know.
//
// It makes no range in profiles: `Range` is that of the launch.
class EnqueuedWork : public c10d::Work {
 public:
  EnqueuedWork(int rank, const std::string& operation, std::vector<at::Tensor> outputs, std::vector<at::Tensor> tensors)
      : c10d::Work(rank, c10d::OpType::UNKNOWN),
        operation_(operation),
        outputs_(std::move(outputs)),
        tensors_(std::move(tensors)),
        end_(std::make_shared<CallEnd>(outputs_.at(0).device())) {
    if (!tensors_.empty()) {
      make_future();  // now, as it remembers what the current stream has
    }
  }

  ~EnqueuedWork() override {
    for (const auto& tensor : tensors_) {
      try {
        end_->keep_memory_of(tensor);
      } catch (...) {  // the process ends
      }
    }
  }

  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override {
    end_->wait();
    release_tensors();
    if (timeout != kNoTimeout) {
      const auto limit = std::chrono::steady_clock::now() + timeout;
      while (!end_->query()) {
        TORCH_CHECK_WITH(
            DistBackendError, std::chrono::steady_clock::now() < limit, not_ended(operation_, timeout));
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    }
    raise_failure();
    return true;
  }

  void synchronize() override {
    wait();
  }

  bool isCompleted() override {
    const bool is_completed = end_->query();
    raise_failure();
    return is_completed;
  }

  bool isSuccess() const override {
    return end_->query();
  }

  std::vector<at::Tensor> result() override {
    return outputs_;
  }

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!future_) {
      end_->wait();  // the future remembers the current stream
      make_future();
    }
    return future_;
  }

  std::shared_ptr<CallEnd> end() const {
    return end_;
  }

 private:
  void make_future() {
    future_ = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{outputs_.at(0).device()});
    future_->markCompleted(c10::IValue(outputs_));
  }

  void release_tensors() {
    std::vector<at::Tensor> released;
    std::lock_guard<std::mutex> lock(mutex_);
    released.swap(tensors_);
  }

  std::string operation_;
  std::vector<at::Tensor> outputs_;
  std::vector<at::Tensor> tensors_;
  std::shared_ptr<CallEnd> end_;
  std::mutex mutex_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// Several calls as one, of a batch that torch has coalesced.
class SeveralWorks : public c10d::Work {
 public:
  explicit SeveralWorks(std::vector<c10::intrusive_ptr<c10d::Work>> works) : works_(std::move(works)) {}

  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override {
    for (const auto& work : works_) {
      work->wait(timeout);
    }
    return true;
  }

  bool isCompleted() override {
    return std::all_of(works_.begin(), works_.end(), [](const auto& work) { return work->isCompleted(); });
  }

  bool isSuccess() const override {
    return std::all_of(works_.begin(), works_.end(), [](const auto& work) { return work->isSuccess(); });
  }

 private:
  std::vector<c10::intrusive_ptr<c10d::Work>> works_;
};

} // namespace stretto
