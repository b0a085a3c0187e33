// The Python class rollout_worker.drafting._native.Batch.
#pragma once

#include <nanobind/nanobind.h>

namespace das {

void bind_batch(nanobind::module_& m);

}  // namespace das
