// The Python module rollout_worker.drafting._native. Arguments are checked here; rollout_worker/drafting/index.py
// documents them.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "suffix_index.hpp"

namespace nb = nanobind;

namespace {

using das::Token;
using TokenArray = nb::ndarray<const Token, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// The value of an int, or of what can stand for one as a numpy integer can; none otherwise, or beyond 64 bits.
std::optional<std::int64_t> integer_of(nb::handle object) {
  const nb::object integer = nb::steal(PyNumber_Index(object.ptr()));
  int overflow = 1;
  std::int64_t value = 0;
  if (integer.is_valid()) {
    value = PyLong_AsLongLongAndOverflow(integer.ptr(), &overflow);
  } else {
    PyErr_Clear();
  }
  return overflow == 0 ? std::optional(value) : std::nullopt;
}

// Token ids given as a one-dimensional uint32 array, which is viewed, or as a sequence of integers, which is copied.
class TokenArgument {
 public:
  TokenArgument(nb::handle object, const std::string& name) {
    if (nb::try_cast<TokenArray>(object, array_, false)) {
      tokens_ = {array_.data(), array_.size()};
      const auto start = std::find(tokens_.begin(), tokens_.end(), das::kStart);
      if (start != tokens_.end()) {
        throw nb::value_error((name + " has 4294967295 at position " + std::to_string(start - tokens_.begin()) +
                               "; token ids are 0 to 4294967294")
                                  .c_str());
      }
      return;
    }
    if (nb::hasattr(object, "ndim")) {
      const std::string dimensions = nb::str(nb::object(object.attr("ndim"))).c_str();
      if (dimensions != "1") {
        throw nb::value_error((name + " must be one-dimensional, got an array of " + dimensions + " dimensions").c_str());
      }
    }
    if (!PySequence_Check(object.ptr()) || PyUnicode_Check(object.ptr()) || PyBytes_Check(object.ptr())) {
      throw nb::type_error((name + " must be a one-dimensional uint32 array or a sequence of integers, got " +
                            nb::type_name(object.type()).c_str())
                               .c_str());
    }
    std::ptrdiff_t at = 0;
    for (nb::handle item : nb::iter(object)) {
      const std::optional<std::int64_t> value = integer_of(item);
      if (!value || *value < 0 || *value >= das::kStart) {
        const bool integer = PyIndex_Check(item.ptr()) != 0;
        const std::string message = name + " has " + nb::str(item).c_str() + " at position " + std::to_string(at) +
                                    (integer ? "; token ids are 0 to 4294967294" : ", which is not an integer");
        if (integer) throw nb::value_error(message.c_str());
        throw nb::type_error(message.c_str());
      }
      copy_.push_back(static_cast<Token>(*value));
      ++at;
    }
    tokens_ = copy_;
  }
  TokenArgument(TokenArgument&& other) noexcept
      : array_(std::move(other.array_)), copy_(std::move(other.copy_)), tokens_(other.tokens_) {}

  std::span<const Token> tokens() const { return tokens_; }

 private:
  TokenArray array_;
  std::vector<Token> copy_;
  std::span<const Token> tokens_;
};

const char* name_of(das::Source source) { return source == das::Source::history ? "history" : "self"; }

void check_survival(double min_survival) {
  if (!(min_survival >= 0.0 && min_survival <= 1.0)) {
    throw nb::value_error(
        ("min_survival is a probability, from 0 to 1, got " + std::to_string(min_survival)).c_str());
  }
}

std::size_t check_budget(std::int64_t budget) {
  if (budget < 0) {
    throw nb::value_error(("a budget is a number of tokens, 0 or more, got " + std::to_string(budget)).c_str());
  }
  return static_cast<std::size_t>(budget);
}

std::size_t add(das::SuffixIndex& index, const std::string& problem, nb::handle rollouts) {
  std::vector<std::string> ids;
  std::vector<std::int64_t> generations;
  std::vector<TokenArgument> tokens;
  for (nb::handle item : nb::iter(rollouts)) {
    const std::string where = "rollout " + std::to_string(ids.size()) + " of problem '" + problem + "'";
    if (!PySequence_Check(item.ptr()) || nb::len(item) != 3) {
      throw nb::type_error((where + " must be (rollout_id, generation, tokens)").c_str());
    }
    std::string id;
    if (!nb::try_cast(item[0], id)) throw nb::type_error((where + ": the rollout id must be a str").c_str());
    const std::optional<std::int64_t> generation = integer_of(item[1]);
    if (!generation) throw nb::type_error((where + ": the generation must be an int that fits 64 bits").c_str());
    tokens.emplace_back(item[2], "rollout '" + id + "' of problem '" + problem + "'");
    ids.push_back(std::move(id));
    generations.push_back(*generation);
  }
  const nb::gil_scoped_release released;
  std::vector<das::Rollout> batch;
  batch.reserve(ids.size());
  for (std::size_t i = 0; i < ids.size(); ++i) batch.push_back({ids[i], generations[i], tokens[i].tokens()});
  return index.add(problem, batch);
}

std::int64_t open(das::SuffixIndex& index, const std::string& problem, nb::handle prompt, bool history, bool self) {
  const TokenArgument tokens(prompt, "the prompt");
  const nb::gil_scoped_release released;
  return index.open(problem, tokens.tokens(), history, self);
}

void extend(das::SuffixIndex& index, std::int64_t handle, nb::handle tokens) {
  const TokenArgument argument(tokens, "tokens");
  const nb::gil_scoped_release released;
  index.extend(handle, argument.tokens());
}

std::vector<das::Draft> draft_batch(das::SuffixIndex& index, const std::vector<std::int64_t>& handles,
                                    const std::vector<std::int64_t>& budgets, double min_survival) {
  check_survival(min_survival);
  if (handles.size() != budgets.size()) {
    throw nb::value_error(("each handle needs one budget, got " + std::to_string(handles.size()) + " handles and " +
                           std::to_string(budgets.size()) + " budgets")
                              .c_str());
  }
  std::vector<std::size_t> limits;
  limits.reserve(budgets.size());
  for (const std::int64_t budget : budgets) limits.push_back(check_budget(budget));
  const nb::gil_scoped_release released;
  return index.draft(handles, limits, min_survival);
}

das::Draft draft(das::SuffixIndex& index, std::int64_t handle, std::int64_t budget, double min_survival) {
  check_survival(min_survival);
  const std::size_t limit = check_budget(budget);
  const nb::gil_scoped_release released;
  return std::move(index.draft({&handle, 1}, {&limit, 1}, min_survival).front());
}

nb::list calibration(const das::SuffixIndex& index) {
  nb::list rows;
  for (const das::CalibrationRow& row : index.calibration()) {
    rows.append(nb::make_tuple(name_of(row.source), row.match_length, row.share, row.votes, row.accepted,
                               row.rejected, row.probability));
  }
  return rows;
}

nb::list counters(const das::SuffixIndex& index) {
  nb::list rows;
  for (const das::Source source : {das::Source::history, das::Source::self}) {
    const das::SourceCounts counts = index.counts(source);
    rows.append(nb::make_tuple(name_of(source), counts.drafts, counts.drafted, counts.verified, counts.accepted));
  }
  return rows;
}

}  // namespace

NB_MODULE(_native, m) {
  // Engine processes end by os._exit or a signal, with an index alive: nothing leaks that the system does not take back.
  nb::set_leak_warnings(false);
  m.doc() = "The suffix index behind rollout_worker.drafting.index.";
  nb::register_exception_translator([](const std::exception_ptr& error, void*) {
    try {
      std::rethrow_exception(error);
    } catch (const das::UnknownRequest& unknown) {
      PyErr_SetString(PyExc_KeyError, unknown.what());
    }
  });

  nb::class_<das::Draft>(m, "Draft")
      .def_ro("tokens", &das::Draft::tokens)
      .def_ro("probabilities", &das::Draft::probabilities)
      .def_prop_ro("source", [](const das::Draft& draft) { return draft.source ? name_of(*draft.source) : "none"; })
      .def_ro("match_length", &das::Draft::match_length)
      .def("__len__", [](const das::Draft& draft) { return draft.tokens.size(); })
      .def("__repr__", [](nb::handle_t<das::Draft> self) {
        return nb::str("Draft(tokens={!r}, probabilities={!r}, source={!r}, match_length={!r})")
            .format(self.attr("tokens"), self.attr("probabilities"), self.attr("source"), self.attr("match_length"));
      });

  using released = nb::call_guard<nb::gil_scoped_release>;
  nb::class_<das::SuffixIndex>(m, "SuffixIndex")
      .def(nb::init<std::size_t, std::size_t>(), nb::arg("max_match"), nb::arg("min_match"))
      .def("add", &add, nb::arg("problem"), nb::arg("rollouts"))
      .def("drop_rollout", &das::SuffixIndex::drop_rollout, nb::arg("problem"), nb::arg("rollout_id"), released())
      .def("drop_before", &das::SuffixIndex::drop_before, nb::arg("problem"), nb::arg("generation"), released())
      .def("drop_problem", &das::SuffixIndex::drop_problem, nb::arg("problem"), released())
      .def("problems", &das::SuffixIndex::problems, released())
      .def("rollouts", &das::SuffixIndex::rollouts, nb::arg("problem"), released())
      .def("tokens", &das::SuffixIndex::tokens, nb::arg("problem"), released())
      .def("total_bytes", [](const das::SuffixIndex& index) { return index.bytes(); })
      .def("problem_bytes", [](das::SuffixIndex& index, std::string_view problem) { return index.bytes(problem); },
           nb::arg("problem"), released())
      .def("open", &open, nb::arg("problem"), nb::arg("prompt").none(), nb::arg("history"), nb::arg("self_text"))
      .def("extend", &extend, nb::arg("handle"), nb::arg("tokens").none())
      .def("close", &das::SuffixIndex::close, nb::arg("handle"), released())
      .def("draft", &draft, nb::arg("handle"), nb::arg("budget"), nb::arg("min_survival"))
      .def("draft_batch", &draft_batch, nb::arg("handles"), nb::arg("budgets"), nb::arg("min_survival"))
      .def("calibration", &calibration)
      .def("counters", &counters);
}
