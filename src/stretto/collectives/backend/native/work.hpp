// SPDX-License-Identifier: Apache-2.0
// The Works of calls that schedules run: a worker thread ends those on the host, a stream those on a GPU.
#pragma once

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

  void operator()() const {
    if (summary && *summary && Py_IsInitialized()) {
      py::gil_scoped_acquire gil;
      (*check)();
    }
  }
};

inline FailureCheck raise_failure;

class ScheduledWork : public c10d::Work {
 public:
  ScheduledWork(int rank, const std::string& operation, std::vector<at::Tensor> outputs)
      : c10d::Work(rank, c10d::OpType::UNKNOWN, ("stretto:" + operation).c_str(), std::optional(outputs)),
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
        TORCH_CHECK_WITH(
            DistBackendError, false, operation_, ": the schedule has not ended within ", timeout.count(), " ms");
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

// A call whose kernels have been enqueued on the current stream. As with NCCL, `wait` makes the caller's stream wait,
// not the host, and the Work is completed once the GPU has run the kernels.
class EnqueuedWork : public c10d::Work {
 public:
  EnqueuedWork(int rank, const std::string& operation, std::vector<at::Tensor> outputs)
      : c10d::Work(rank, c10d::OpType::UNKNOWN, ("stretto:" + operation).c_str(), std::optional(outputs)),
        outputs_(std::move(outputs)),
        device_(outputs_.at(0).device()),
        guard_(device_.type()),
        end_(device_.type()) {
    end_.record(guard_.getStream(device_));
  }

  bool wait(std::chrono::milliseconds = kNoTimeout) override {
    end_.block(guard_.getStream(device_));
    raise_failure();
    return true;
  }

  void synchronize() override {
    wait();
  }

  bool isCompleted() override {
    const bool is_completed = end_.query();
    raise_failure();
    return is_completed;
  }

  bool isSuccess() const override {
    return end_.query();
  }

  std::vector<at::Tensor> result() override {
    return outputs_;
  }

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    std::lock_guard<std::mutex> lock(future_mutex_);
    if (!future_) {
      future_ = c10::make_intrusive<c10::ivalue::Future>(
          c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{device_});
      end_.block(guard_.getStream(device_));  // the future remembers the current stream
      future_->markCompleted(c10::IValue(outputs_));
    }
    return future_;
  }

 private:
  std::vector<at::Tensor> outputs_;
  c10::Device device_;
  c10::impl::VirtualGuardImpl guard_;
  c10::Event end_;
  std::mutex future_mutex_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

} // namespace stretto
