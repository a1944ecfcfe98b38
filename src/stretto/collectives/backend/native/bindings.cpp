// SPDX-License-Identifier: Apache-2.0
// The Python names of the backend, its options and its Work. Arguments are given by position.
#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>

#include "backend.hpp"
#include "range.hpp"

namespace py = pybind11;

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  py::module_::import("torch._C._distributed_c10d");
  py::class_<stretto::StrettoOptions, c10d::Backend::Options, c10::intrusive_ptr<stretto::StrettoOptions>>(
      module, "StrettoOptions")
      .def(
          py::init([](int64_t milliseconds) {
            return c10::make_intrusive<stretto::StrettoOptions>(std::chrono::milliseconds(milliseconds));
          }),
          py::arg("milliseconds"))
      .def(
          "__deepcopy__",
          [](const stretto::StrettoOptions& self, const py::object&) {
            return c10::make_intrusive<stretto::StrettoOptions>(self);
          },
          py::arg("memo"));
  py::class_<stretto::ScheduledWork, c10d::Work, c10::intrusive_ptr<stretto::ScheduledWork>>(module, "ScheduledWork")
      .def(py::init<int, const std::string&, std::vector<at::Tensor>, const std::vector<at::Tensor>&>())
      .def("succeed", &stretto::ScheduledWork::succeed, py::call_guard<py::gil_scoped_release>())
      .def("fail", &stretto::ScheduledWork::fail);
  py::class_<stretto::CallEnd, std::shared_ptr<stretto::CallEnd>>(module, "CallEnd")
      .def("wait", &stretto::CallEnd::wait)
      .def("query", &stretto::CallEnd::query)
      .def("synchronize", &stretto::CallEnd::synchronize, py::call_guard<py::gil_scoped_release>());
  py::class_<stretto::EnqueuedWork, c10d::Work, c10::intrusive_ptr<stretto::EnqueuedWork>>(module, "EnqueuedWork")
      .def(py::init<int, const std::string&, std::vector<at::Tensor>, std::vector<at::Tensor>>())
      .def_property_readonly("end", &stretto::EnqueuedWork::end);
  module.def(
      "set_failure_check",
      [](uint64_t summary, py::object check) {
        stretto::raise_failure.check = new py::object(std::move(check));
        stretto::raise_failure.summary = reinterpret_cast<const volatile int32_t*>(summary);
      });
  py::class_<stretto::Range>(module, "Range")
      .def(py::init<std::string, const std::vector<at::Tensor>&>())
      .def("__enter__", [](stretto::Range&) {})
      .def("__exit__", [](stretto::Range& self, const py::args&) { self.end(); });
  py::class_<stretto::FastCalls, std::shared_ptr<stretto::FastCalls>>(module, "FastCalls")
      .def(py::init<>())
      .def("open", &stretto::FastCalls::open)
      .def("add", &stretto::FastCalls::add)
      .def("add_inner", &stretto::FastCalls::add_inner)
      .def("add_stream", &stretto::FastCalls::add_stream)
      .def("clear", &stretto::FastCalls::clear)
      .def("hold", &stretto::FastCalls::hold)
      .def("pause", &stretto::FastCalls::pause)
      .def("release", &stretto::FastCalls::release)
      .def("follow", &stretto::FastCalls::follow)
      .def("counts", &stretto::FastCalls::counts);
  py::class_<stretto::StrettoBackend, c10d::Backend, c10::intrusive_ptr<stretto::StrettoBackend>>(
      module, "StrettoBackend")
      .def(
          py::init<
              int,
              int,
              c10::intrusive_ptr<c10d::Backend>,
              c10::intrusive_ptr<c10d::Backend>,
              py::object,
              py::object,
              c10::intrusive_ptr<stretto::StrettoOptions>,
              std::shared_ptr<stretto::FastCalls>>())
      .def_property_readonly("dispatch", &stretto::StrettoBackend::dispatch)
      .def_property_readonly("options", &stretto::StrettoBackend::options)
      // Under the name that gloo and NCCL use for it.
      .def(
          "_set_default_timeout",
          &stretto::StrettoBackend::setTimeout,
          py::arg("timeout"),
          py::call_guard<py::gil_scoped_release>())
      // new_group calls it on ranks outside the group; members make new communicators and split none.
      .def("perform_nocolor_split", [](stretto::StrettoBackend&, const py::object&) {}, py::arg("device"));
}
