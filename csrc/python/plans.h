// Which kernels run on a GPU (common/linear_plan.h, common/attention_plan.h), asked without one.
#pragma once
#include <pybind11/pybind11.h>

void bind_plans(pybind11::module_& m);
