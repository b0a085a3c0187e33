// Checks the arguments of rollout_worker.drafting._native.Batch; rollout_worker/drafting/batch.py documents them.
#include "batch_binding.hpp"

#include <nanobind/ndarray.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "suffix_index.hpp"

namespace nb = nanobind;

namespace das {

namespace {

template <class T>
using Vector = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using Matrix = nb::ndarray<T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// Returns a C-contiguous array argument whose dtype and number of dimensions must be exact.
template <class Array>
Array array_argument(const char* name, nb::handle object, const char* type) {
  Array array;
  if (nb::try_cast<Array>(object, array, false)) return array;
  throw nb::type_error((std::string(name) + " must be a C-contiguous array of shape and type " + type).c_str());
}

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

template <class T>
std::span<T> span_of(const Vector<T>& array) {
  return {array.data(), array.size()};
}

class Batch {
 public:
  Batch(SuffixIndex& index, nb::handle token_ids, nb::handle drafts, nb::handle lengths, nb::handle generated,
        nb::handle expected)
      : index_(index),
        token_ids_(array_argument<Matrix<const std::int32_t>>("token_ids", token_ids, "(places, tokens) int32")),
        drafts_(array_argument<Matrix<std::int64_t>>("drafts", drafts, "(places, K) int64, writable")),
        lengths_(array_argument<Vector<std::int32_t>>("lengths", lengths, "(places,) int32, writable")),
        generated_(array_argument<Vector<std::int64_t>>("generated", generated, "(places,) int64, writable")),
        expected_(array_argument<Vector<double>>("expected", expected, "(places,) float64, writable")),
        arrays_{{token_ids_.data(), token_ids_.size()},
                token_ids_.shape(1),
                {drafts_.data(), drafts_.size()},
                drafts_.shape(1),
                span_of(lengths_)} {
    check_rows("drafts", drafts_.shape(0), num_places(), "places");
    check_rows("lengths", lengths_.size(), num_places(), "places");
    check_rows("generated", generated_.size(), num_places(), "places");
    check_rows("expected", expected_.size(), num_places(), "places");
  }

  void plan(nb::handle handles, nb::handle budgets, nb::handle min_survivals, nb::handle token_gains,
            double token_cost) {
    const auto handles_in = array_argument<Vector<const std::int64_t>>("handles", handles, "(n,) int64");
    const auto budgets_in = array_argument<Vector<const std::int64_t>>("budgets", budgets, "(n,) int64");
    const auto thresholds = array_argument<Vector<const double>>("min_survivals", min_survivals, "(n,) float64");
    const auto gains = array_argument<Vector<const double>>("token_gains", token_gains, "(n,) float64");
    const std::size_t count = handles_in.size();
    check_rows("budgets", budgets_in.size(), count, "handles");
    check_rows("min_survivals", thresholds.size(), count, "handles");
    check_rows("token_gains", gains.size(), count, "handles");
    BatchPlan plan{.rows = std::vector<BatchPlan::Row>(count), .token_cost = token_cost};
    for (std::size_t i = 0; i < count; ++i) {
      if (budgets_in(i) < 0) {
        reject(i, "a budget must be 0 or more tokens, got " + std::to_string(budgets_in(i)));
      }
      if (!(thresholds(i) >= 0.0 && thresholds(i) <= 1.0)) {
        reject(i, "min_survival must be a probability from 0 to 1, got " + std::to_string(thresholds(i)));
      }
      plan.rows[i] = {static_cast<std::size_t>(budgets_in(i)), thresholds(i), gains(i)};
    }
    plan.requests = index_.find_requests(span_of(handles_in));
    plan_ = std::move(plan);
  }

  void clear() { plan_ = {.requests = std::make_shared<const RequestList>(), .rows = {}}; }

  nb::tuple step(nb::handle num_tokens, nb::handle rows, nb::handle places, nb::handle verified) {
    const auto num_tokens_in = array_argument<Vector<const std::int32_t>>("num_tokens", num_tokens, "(places,) int32");
    const auto rows_in = array_argument<Vector<const std::int64_t>>("rows", rows, "(n,) int64");
    const auto places_in = array_argument<Vector<const std::int64_t>>("places", places, "(n,) int64");
    const auto verified_in = array_argument<Vector<const std::int64_t>>("verified", verified, "(n,) int64");
    const std::size_t count = rows_in.size();
    check_rows("num_tokens", num_tokens_in.size(), num_places(), "places");
    check_rows("places", places_in.size(), count, "requests");
    check_rows("verified", verified_in.size(), count, "requests");
    const auto planned = static_cast<std::int64_t>(plan_.rows.size());
    const auto place_count = static_cast<std::int64_t>(num_places());
    if (count > num_places()) {
      throw nb::value_error(("there are " + std::to_string(count) + " requests, but " + std::to_string(place_count) +
                             " places")
                                .c_str());
    }
    for (std::size_t i = 0; i < count; ++i) {
      if (rows_in(i) < -1 || rows_in(i) >= planned) {
        reject(i, "the plan has no row " + std::to_string(rows_in(i)) + ", only " + std::to_string(planned) + " rows");
      }
      if (places_in(i) < 0 || places_in(i) >= place_count) {
        reject(i, "there is no place " + std::to_string(places_in(i)) + " of " + std::to_string(place_count));
      }
      if (verified_in(i) < 0) {
        reject(i, "verified must be 0 or more tokens, got " + std::to_string(verified_in(i)));
      }
    }
    // The GIL is kept, because another thread that takes it in the meantime may keep it for longer than a step lasts.
    const StepTotals totals = index_.step({arrays_,
                                           plan_,
                                           span_of(num_tokens_in),
                                           span_of(rows_in),
                                           span_of(places_in),
                                           span_of(verified_in),
                                           span_of(generated_).first(count),
                                           span_of(expected_).first(count)});
    return nb::make_tuple(totals.drafts, totals.tokens, totals.gain);
  }

 private:
  std::size_t num_places() const { return token_ids_.shape(0); }

  SuffixIndex& index_;
  // The arrays stay alive as long as the batch.
  const Matrix<const std::int32_t> token_ids_;
  const Matrix<std::int64_t> drafts_;
  const Vector<std::int32_t> lengths_;
  const Vector<std::int64_t> generated_;
  const Vector<double> expected_;
  const EngineArrays arrays_;
  BatchPlan plan_{.requests = std::make_shared<const RequestList>(), .rows = {}};
};

}  // namespace

void bind_batch(nb::module_& m) {
  nb::class_<Batch>(m, "Batch")
      .def(nb::init<SuffixIndex&, nb::handle, nb::handle, nb::handle, nb::handle, nb::handle>(),
           nb::keep_alive<1, 2>(), nb::arg("index"), nb::arg("token_ids"), nb::arg("drafts"), nb::arg("lengths"),
           nb::arg("generated"), nb::arg("expected"))
      .def("plan", &Batch::plan, nb::arg("handles"), nb::arg("budgets"), nb::arg("min_survivals"),
           nb::arg("token_gains"), nb::arg("token_cost"))
      .def("clear", &Batch::clear)
      .def("step", &Batch::step, nb::arg("num_tokens"), nb::arg("rows"), nb::arg("places"), nb::arg("verified"));
}

}  // namespace das
