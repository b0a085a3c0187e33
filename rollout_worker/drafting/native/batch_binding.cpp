// Checks the arguments of rollout_worker.drafting._native.Batch; rollout_worker/drafting/batch.py documents them.

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "suffix_index.hpp"

namespace nb = nanobind;

namespace das {

namespace {

// A C-contiguous array, which is read or written in place. The buffer protocol takes a fraction of the time of
// nanobind's own conversion.
template <class T>
class Array {
 public:
  // `type` describes the expected shape and type.
  Array(const char* name, nb::handle object, int dimensions, const char* type) {
    constexpr int flags = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (std::is_const_v<T> ? 0 : PyBUF_WRITABLE);
    if (PyObject_GetBuffer(object.ptr(), &buffer_, flags) != 0) {
      PyErr_Clear();
      fail(name, type);
    }
    if (buffer_.ndim != dimensions || !has_type()) {
      PyBuffer_Release(&buffer_);
      fail(name, type);
    }
  }
  ~Array() { PyBuffer_Release(&buffer_); }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;

  std::size_t shape(std::size_t dimension) const { return static_cast<std::size_t>(buffer_.shape[dimension]); }
  std::size_t size() const { return static_cast<std::size_t>(buffer_.len) / sizeof(T); }
  std::span<T> span() const { return {static_cast<T*>(buffer_.buf), size()}; }
  T operator()(std::size_t i) const { return static_cast<T*>(buffer_.buf)[i]; }

 private:
  [[noreturn]] static void fail(const char* name, const char* type) {
    throw nb::type_error((std::string(name) + " must be a C-contiguous array of shape and type " + type).c_str());
  }
  bool has_type() const {
    const std::string_view format = buffer_.format;
    const char* const codes = std::is_floating_point_v<T> ? "fd" : "ilq";  // signed integers
    return format.size() == 1 && std::string_view(codes).find(format[0]) != std::string_view::npos &&
           buffer_.itemsize == sizeof(T);
  }

  Py_buffer buffer_;
};

// Checks the first dimension of an array.
void check_rows(const char* name, std::size_t rows, std::size_t expected, const char* what) {
  if (rows == expected) return;
  throw nb::value_error((std::string(name) + " has " + std::to_string(rows) + " rows, but there are " +
                         std::to_string(expected) + " " + what)
                            .c_str());
}

[[noreturn]] void reject(std::size_t number, const std::string& what) {
  throw nb::value_error(("request " + std::to_string(number) + ": " + what).c_str());
}

class Batch {
 public:
  Batch(SuffixIndex& index, nb::handle token_ids, nb::handle drafts, nb::handle lengths, nb::handle generated,
        nb::handle expected)
      : index_(index),
        token_ids_("token_ids", token_ids, 2, "(places, tokens) int32"),
        drafts_("drafts", drafts, 2, "(places, K) int64, writable"),
        lengths_("lengths", lengths, 1, "(places,) int32, writable"),
        generated_("generated", generated, 1, "(places,) int64, writable"),
        expected_("expected", expected, 1, "(places,) float64, writable"),
        arrays_{token_ids_.span(), token_ids_.shape(1), drafts_.span(), drafts_.shape(1), lengths_.span()} {
    check_rows("drafts", drafts_.shape(0), num_places(), "places");
    check_rows("lengths", lengths_.size(), num_places(), "places");
    check_rows("generated", generated_.size(), num_places(), "places");
    check_rows("expected", expected_.size(), num_places(), "places");
  }

  void plan(nb::handle handles, nb::handle budgets, nb::handle min_survivals, nb::handle token_gains, nb::handle costs,
            bool shortens, std::vector<std::size_t> uniform_lengths, double time_limit_s, double min_gain_s) {
    const Array<const std::int64_t> handles_in("handles", handles, 1, "(n,) int64");
    const Array<const std::int64_t> budgets_in("budgets", budgets, 1, "(n,) int64");
    const Array<const double> thresholds("min_survivals", min_survivals, 1, "(n,) float64");
    const Array<const double> gains("token_gains", token_gains, 1, "(n,) float64");
    const Array<const double> costs_in("costs", costs, 1, "(m,) float64");
    const std::size_t count = handles_in.size();
    check_rows("budgets", budgets_in.size(), count, "handles");
    check_rows("min_survivals", thresholds.size(), count, "handles");
    check_rows("token_gains", gains.size(), count, "handles");
    if (costs_in.size() == 0) throw nb::value_error("costs must have at least one element, for no draft tokens");
    if (!(time_limit_s >= 0.0)) {
      throw nb::value_error(("time_limit_s must be 0 or more seconds, got " + std::to_string(time_limit_s)).c_str());
    }
    BatchPlan plan = empty_plan();
    plan.rows.resize(count);
    plan.costs.assign(costs_in.span().begin(), costs_in.span().end());
    plan.shortens = shortens;
    std::ranges::sort(uniform_lengths);
    plan.uniform_lengths = std::move(uniform_lengths);
    plan.time_limit = std::chrono::nanoseconds(static_cast<std::int64_t>(std::min(time_limit_s, kMaxTimeLimit) * 1e9));
    for (std::size_t i = 0; i < count; ++i) {
      if (budgets_in(i) < 0) {
        reject(i, "a budget must be 0 or more tokens, got " + std::to_string(budgets_in(i)));
      }
      if (!(thresholds(i) >= 0.0 && thresholds(i) <= 1.0)) {
        reject(i, "min_survival must be a probability from 0 to 1, got " + std::to_string(thresholds(i)));
      }
      plan.rows[i] = {static_cast<std::size_t>(budgets_in(i)), thresholds(i), gains(i)};
    }
    plan.min_gain = min_gain_s;
    plan.sort();
    plan.requests = index_.find_requests(handles_in.span());
    plan_ = std::move(plan);
  }

  void clear() { plan_ = empty_plan(); }

  nb::tuple step(nb::handle num_tokens, nb::handle rows, nb::handle places, nb::handle verified) {
    const Array<const std::int32_t> num_tokens_in("num_tokens", num_tokens, 1, "(places,) int32");
    const Array<const std::int64_t> rows_in("rows", rows, 1, "(n,) int64");
    const Array<const std::int64_t> places_in("places", places, 1, "(n,) int64");
    const Array<const std::int64_t> verified_in("verified", verified, 1, "(n,) int64");
    const std::size_t count = rows_in.size();
    check_rows("num_tokens", num_tokens_in.size(), num_places(), "places");
    check_rows("verified", verified_in.size(), count, "requests");
    check_requests(rows_in, places_in);
    for (std::size_t i = 0; i < count; ++i) {
      if (verified_in(i) < 0) {
        reject(i, "verified must be 0 or more tokens, got " + std::to_string(verified_in(i)));
      }
    }
    // The GIL is kept, because another thread that takes it in the meantime may keep it for longer than a step lasts.
    const StepTotals totals =
        index_.step({arrays_, plan_, num_tokens_in.span(), rows_in.span(), places_in.span(), verified_in.span(),
                     generated_.span().first(count), expected_.span().first(count)});
    return nb::make_tuple(totals.drafts, totals.tokens, totals.gain);
  }

  void keep_only(nb::handle rows, nb::handle places, std::optional<std::int64_t> kept) {
    const Array<const std::int64_t> rows_in("rows", rows, 1, "(n,) int64");
    const Array<const std::int64_t> places_in("places", places, 1, "(n,) int64");
    check_requests(rows_in, places_in);
    if (kept && (*kept < 0 || *kept >= static_cast<std::int64_t>(rows_in.size()))) {
      throw nb::value_error(
          ("there is no request " + std::to_string(*kept) + ", only " + std::to_string(rows_in.size()) + " requests")
              .c_str());
    }
    index_.keep_only(arrays_, plan_, rows_in.span(), places_in.span(), kept);
  }

 private:
  // Checks the rows and places of the requests of a step.
  void check_requests(const Array<const std::int64_t>& rows, const Array<const std::int64_t>& places) const {
    const std::size_t count = rows.size();
    check_rows("places", places.size(), count, "requests");
    const auto planned = static_cast<std::int64_t>(plan_.rows.size());
    const auto place_count = static_cast<std::int64_t>(num_places());
    if (count > num_places()) {
      throw nb::value_error(
          ("there are " + std::to_string(count) + " requests, but " + std::to_string(place_count) + " places").c_str());
    }
    for (std::size_t i = 0; i < count; ++i) {
      if (rows(i) < -1 || rows(i) >= planned) {
        reject(i, "the plan has no row " + std::to_string(rows(i)) + ", only " + std::to_string(planned) + " rows");
      }
      if (places(i) < 0 || places(i) >= place_count) {
        reject(i, "there is no place " + std::to_string(places(i)) + " of " + std::to_string(place_count));
      }
    }
  }

  static constexpr double kMaxTimeLimit = 3600.0;  // seconds, so that none is too large for a clock

  static BatchPlan empty_plan() { return {.requests = std::make_shared<const RequestList>(), .rows = {}}; }
  std::size_t num_places() const { return token_ids_.shape(0); }

  SuffixIndex& index_;
  // The arrays stay alive as long as the batch.
  const Array<const std::int32_t> token_ids_;
  const Array<std::int64_t> drafts_;
  const Array<std::int32_t> lengths_;
  const Array<std::int64_t> generated_;
  const Array<double> expected_;
  const EngineArrays arrays_;
  BatchPlan plan_ = empty_plan();
};

}  // namespace

void bind_batch(nb::module_& m) {
  nb::class_<Batch>(m, "Batch")
      .def(nb::init<SuffixIndex&, nb::handle, nb::handle, nb::handle, nb::handle, nb::handle>(), nb::keep_alive<1, 2>(),
           nb::arg("index"), nb::arg("token_ids"), nb::arg("drafts"), nb::arg("lengths"), nb::arg("generated"),
           nb::arg("expected"))
      .def("plan", &Batch::plan, nb::arg("handles"), nb::arg("budgets"), nb::arg("min_survivals"),
           nb::arg("token_gains"), nb::arg("costs"), nb::kw_only(), nb::arg("shortens"), nb::arg("uniform_lengths"),
           nb::arg("time_limit_s"), nb::arg("min_gain_s"))
      .def("clear", &Batch::clear)
      .def("step", &Batch::step, nb::arg("num_tokens"), nb::arg("rows"), nb::arg("places"), nb::arg("verified"))
      .def("keep_only", &Batch::keep_only, nb::arg("rows"), nb::arg("places"), nb::arg("kept").none());
}

}  // namespace das
