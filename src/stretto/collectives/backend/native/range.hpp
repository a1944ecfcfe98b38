// SPDX-License-Identifier: Apache-2.0
// A call's range in profiles, like those of c10d's own backends: "stretto:all_reduce".
#pragma once

#include <string>
#include <utility>
#include <vector>

#include <ATen/record_function.h>

namespace stretto {

class Range {
 public:
  Range(std::string name, const std::vector<at::Tensor>& tensors)
      : name_(std::move(name)), function_(at::RecordScope::USER_SCOPE) {
    if (!function_.isActive()) {
      return;
    }
    function_._setAsync();  // streams go on after its end, as after c10d's ranges
    if (function_.needsInputs()) {
      inputs_.assign(tensors.begin(), tensors.end());
      function_.before(name_.c_str(), c10::ArrayRef<const c10::IValue>(inputs_.data(), inputs_.size()));
    } else {
      function_.before(name_.c_str());
    }
  }

  void end() {
    function_.end();
  }

 private:
  std::string name_;
  std::vector<c10::IValue> inputs_;
  at::RecordFunction function_;
};

} // namespace stretto
