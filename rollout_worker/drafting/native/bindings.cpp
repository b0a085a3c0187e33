// The Python module rollout_worker.drafting._native. It checks arguments; rollout_worker/drafting/index.py documents
// them.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "suffix_index.hpp"

namespace nb = nanobind;

namespace das {
void bind_batch(nb::module_& m);  // in batch_binding.cpp
}

namespace {

using das::DraftToken;
using das::Token;
using TokenArray = nb::ndarray<const Token, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Returns the value of an int or of an object with __index__, such as a NumPy integer; nullopt for other objects and
// for values beyond 64 bits.
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

// Token ids given as a one-dimensional uint32 array, which is read in place, or as a sequence of integers, which is
// copied.
class TokenArgument {
 public:
  // `name` returns the name of the argument for error messages.
  template <class Name>
  TokenArgument(nb::handle object, Name name) {
    if (PyList_CheckExact(object.ptr()) && try_copy_ints(object.ptr())) return;
    if (nb::try_cast<TokenArray>(object, array_, false)) {
      tokens_ = {array_.data(), array_.size()};
      const auto invalid = std::find(tokens_.begin(), tokens_.end(), das::kBoundary);
      if (invalid != tokens_.end()) {
        throw nb::value_error((name() + " has 4294967295 at position " + std::to_string(invalid - tokens_.begin()) +
                               "; token ids are 0 to 4294967294")
                                  .c_str());
      }
      return;
    }
    if (nb::hasattr(object, "ndim")) {
      const std::string dimensions = nb::str(nb::object(object.attr("ndim"))).c_str();
      if (dimensions != "1") {
        const std::string message = " must be one-dimensional, got an array of " + dimensions + " dimensions";
        throw nb::value_error((name() + message).c_str());
      }
    }
    if (!PySequence_Check(object.ptr()) || PyUnicode_Check(object.ptr()) || PyBytes_Check(object.ptr())) {
      throw nb::type_error((name() + " must be a one-dimensional uint32 array or a sequence of integers, got " +
                            nb::type_name(object.type()).c_str())
                               .c_str());
    }
    std::ptrdiff_t index = 0;
    for (nb::handle item : nb::iter(object)) {
      const std::optional<std::int64_t> value = integer_of(item);
      if (!value || *value < 0 || *value >= das::kBoundary) {
        const bool is_integer = PyIndex_Check(item.ptr()) != 0;
        const std::string message = name() + " has " + nb::str(item).c_str() + " at position " + std::to_string(index) +
                                    (is_integer ? "; token ids are 0 to 4294967294" : ", which is not an integer");
        if (is_integer) throw nb::value_error(message.c_str());
        throw nb::type_error(message.c_str());
      }
      copy_.push_back(static_cast<Token>(*value));
      ++index;
    }
    tokens_ = copy_;
  }
  TokenArgument(TokenArgument&& other) noexcept
      : array_(std::move(other.array_)), copy_(std::move(other.copy_)), tokens_(other.tokens_) {}

  std::span<const Token> tokens() const { return tokens_; }

 private:
  // Copies a list of valid ints. This is the fast path for what an engine passes for each request in each step. Returns
  // false if the list contains anything else.
  bool try_copy_ints(PyObject* list) {
    const Py_ssize_t length = PyList_GET_SIZE(list);
    copy_.reserve(static_cast<std::size_t>(length));
    for (Py_ssize_t i = 0; i < length; ++i) {
      PyObject* const item = PyList_GET_ITEM(list, i);
      int overflow = 0;
      const std::int64_t value = PyLong_CheckExact(item) ? PyLong_AsLongLongAndOverflow(item, &overflow) : -1;
      if (overflow != 0 || value < 0 || value >= das::kBoundary) {
        copy_.clear();
        return false;
      }
      copy_.push_back(static_cast<Token>(value));
    }
    tokens_ = copy_;
    return true;
  }

  TokenArray array_;
  std::vector<Token> copy_;
  std::span<const Token> tokens_;
};

const char* name_of(das::Source source) {
  constexpr std::array<const char*, das::kSources> kNames{"history", "self", "siblings", "cross_problem"};
  return kNames[static_cast<std::size_t>(source)];
}

void check_survival(double min_survival) {
  if (!(min_survival >= 0.0 && min_survival <= 1.0)) {
    throw nb::value_error(
        ("min_survival must be a probability from 0 to 1, got " + std::to_string(min_survival)).c_str());
  }
}

void check_count(const char* name, std::size_t handles, std::size_t given) {
  if (handles == given) return;
  throw nb::value_error(("each handle needs one " + std::string(name) + ", got " + std::to_string(handles) +
                         " handles and " + std::to_string(given) + " " + name + "s")
                            .c_str());
}

std::size_t check_budget(std::int64_t budget) {
  if (budget < 0) {
    throw nb::value_error(("a budget must be 0 or more tokens, got " + std::to_string(budget)).c_str());
  }
  return static_cast<std::size_t>(budget);
}

// Returns a reward that was given for `rollout`.
float reward_of(nb::handle object, const std::string& rollout) {
  double value = 0.0;
  if (!nb::try_cast(object, value)) throw nb::type_error((rollout + ": the reward must be a number or None").c_str());
  const auto reward = static_cast<float>(value);
  if (!std::isfinite(reward)) throw nb::value_error((rollout + ": the reward must be finite").c_str());
  return reward;
}

std::size_t set_rewards(das::SuffixIndex& index, const std::string& problem, nb::dict rewards) {
  std::vector<std::string> ids;
  std::vector<float> values;
  for (const auto& [key, value] : rewards) {
    std::string id;
    if (!nb::try_cast(key, id)) throw nb::type_error("a rollout id must be a str");
    values.push_back(reward_of(value, "rollout '" + id + "' of problem '" + problem + "'"));
    ids.push_back(std::move(id));
  }
  const nb::gil_scoped_release released;
  std::vector<std::pair<std::string_view, float>> batch;
  batch.reserve(ids.size());
  for (std::size_t i = 0; i < ids.size(); ++i) batch.emplace_back(ids[i], values[i]);
  return index.set_rewards(problem, batch);
}

std::size_t add(das::SuffixIndex& index, const std::string& problem, nb::handle rollouts) {
  std::vector<std::string> ids;
  std::vector<std::int64_t> generations;
  std::vector<TokenArgument> tokens;
  std::vector<TokenArgument> contexts;
  std::vector<float> rewards;
  for (nb::handle item : nb::iter(rollouts)) {
    const std::string position = "rollout " + std::to_string(ids.size()) + " of problem '" + problem + "'";
    const std::size_t length = PySequence_Check(item.ptr()) ? nb::len(item) : 0;
    if (length < 3 || length > 5) {
      const char* const shape = " must be (rollout_id, generation, tokens[, context[, reward]])";
      throw nb::type_error((position + shape).c_str());
    }
    // Items are read before they are converted, because reading may raise, but nb::try_cast() is noexcept.
    const nb::object first = item[0];
    std::string id;
    if (!nb::try_cast(first, id)) throw nb::type_error((position + ": the rollout id must be a str").c_str());
    const nb::object second = item[1];
    const std::optional<std::int64_t> generation = integer_of(second);
    if (!generation) throw nb::type_error((position + ": the generation must be a 64-bit int").c_str());
    const auto name = [&] { return "rollout '" + id + "' of problem '" + problem + "'"; };
    const nb::object third = item[2];
    tokens.emplace_back(third, name);
    const nb::object context = length > 3 ? nb::object(item[3]) : nb::object(nb::make_tuple());
    contexts.emplace_back(context, [&] { return "the context of " + name(); });
    const nb::object reward = length > 4 ? nb::object(item[4]) : nb::none();
    rewards.push_back(reward.is_none() ? das::kNoReward : reward_of(reward, name()));
    ids.push_back(std::move(id));
    generations.push_back(*generation);
  }
  const nb::gil_scoped_release released;
  std::vector<das::Rollout> batch;
  batch.reserve(ids.size());
  for (std::size_t i = 0; i < ids.size(); ++i) {
    batch.push_back({ids[i], generations[i], contexts[i].tokens(), tokens[i].tokens(), rewards[i]});
  }
  return index.add(problem, batch);
}

std::int64_t open(das::SuffixIndex& index, const std::string& problem, nb::handle prompt, std::size_t context_length,
                  const das::Sources& sources, nb::handle stop_tokens, const das::DraftLimits& limits) {
  const TokenArgument tokens(prompt, [] { return std::string("the prompt"); });
  const TokenArgument stops(stop_tokens, [] { return std::string("stop_tokens"); });
  const nb::gil_scoped_release released;
  return index.open(problem, {tokens.tokens(), context_length, sources, stops.tokens(), limits});
}

void extend(das::SuffixIndex& index, std::int64_t handle, nb::handle tokens) {
  const TokenArgument argument(tokens, [] { return std::string("tokens"); });
  const nb::gil_scoped_release released;
  const std::span<const Token> span = argument.tokens();
  index.extend({&handle, 1}, {&span, 1});
}

void extend_batch(das::SuffixIndex& index, const std::vector<std::int64_t>& handles, nb::handle tokens) {
  std::vector<TokenArgument> arguments;
  arguments.reserve(handles.size());
  for (nb::handle item : nb::iter(tokens)) {
    arguments.emplace_back(item, [&] { return "tokens " + std::to_string(arguments.size()); });
  }
  if (handles.size() != arguments.size()) {
    throw nb::value_error(("each handle needs one list of tokens, got " + std::to_string(handles.size()) +
                           " handles and " + std::to_string(arguments.size()) + " lists of tokens")
                              .c_str());
  }
  const nb::gil_scoped_release released;
  std::vector<std::span<const Token>> spans;
  spans.reserve(arguments.size());
  for (const TokenArgument& argument : arguments) spans.push_back(argument.tokens());
  index.extend(handles, spans);
}

std::vector<das::Draft> draft_batch(das::SuffixIndex& index, const std::vector<std::int64_t>& handles,
                                    const std::vector<std::int64_t>& budgets,
                                    std::variant<double, std::vector<double>> min_survival) {
  check_count("budget", handles.size(), budgets.size());
  if (const double* scalar = std::get_if<double>(&min_survival)) min_survival = std::vector(handles.size(), *scalar);
  const auto& survivals = std::get<std::vector<double>>(min_survival);
  check_count("min_survival", handles.size(), survivals.size());
  for (const double survival : survivals) check_survival(survival);
  std::vector<std::size_t> limits;
  limits.reserve(budgets.size());
  for (const std::int64_t budget : budgets) limits.push_back(check_budget(budget));
  const nb::gil_scoped_release released;
  return index.draft(handles, limits, survivals);
}

das::Draft draft(das::SuffixIndex& index, std::int64_t handle, std::int64_t budget, double min_survival) {
  check_survival(min_survival);
  const std::size_t limit = check_budget(budget);
  const nb::gil_scoped_release released;
  return std::move(index.draft({&handle, 1}, {&limit, 1}, {&min_survival, 1}).front());
}

nb::list occurrences(das::SuffixIndex& index, std::int64_t handle, std::int64_t length) {
  const std::size_t limit = check_budget(length);
  std::vector<das::OccurrenceText> found;
  {
    const nb::gil_scoped_release released;
    found = index.occurrences(handle, limit);
  }
  nb::list rows;
  for (const das::OccurrenceText& occurrence : found) {
    const nb::object reward = std::isnan(occurrence.reward) ? nb::none() : nb::object(nb::float_(occurrence.reward));
    rows.append(nb::make_tuple(name_of(occurrence.source), occurrence.match, occurrence.generation, occurrence.tokens,
                               reward, occurrence.anchored));
  }
  return rows;
}

nb::tuple text_position(das::SuffixIndex& index, std::int64_t handle) {
  das::TextPosition position{};
  {
    const nb::gil_scoped_release released;
    position = index.text_position(handle);
  }
  const nb::object rest = std::isnan(position.rest) ? nb::none() : nb::object(nb::float_(position.rest));
  return nb::make_tuple(rest, position.match, position.own_match);
}

// Returns the getter of a draft property that lists one value of each token.
template <class Get>
auto list_of(Get get) {
  return [get](const das::Draft& draft) {
    nb::list values;
    for (const DraftToken& token : draft.tokens) values.append(get(token));
    return values;
  };
}

// The serialized state consists of the layout number and the parameters in native byte order.
nb::bytes state_dict(const das::SuffixIndex& index) {
  std::vector<das::ParameterState> states;
  {
    const nb::gil_scoped_release released;
    states = index.state();
  }
  constexpr std::uint32_t layout = das::Mixture::kLayout;
  std::string bytes(sizeof layout + states.size() * sizeof(das::ParameterState), '\0');
  std::memcpy(bytes.data(), &layout, sizeof layout);
  std::memcpy(bytes.data() + sizeof layout, states.data(), bytes.size() - sizeof layout);
  return nb::bytes(bytes.data(), bytes.size());
}

void load_state_dict(das::SuffixIndex& index, const nb::bytes& state) {
  std::uint32_t layout = 0;
  std::vector<das::ParameterState> states;
  if (state.size() > sizeof layout && (state.size() - sizeof layout) % sizeof(das::ParameterState) == 0) {
    std::memcpy(&layout, state.c_str(), sizeof layout);
    states.resize((state.size() - sizeof layout) / sizeof(das::ParameterState));
    std::memcpy(states.data(), state.c_str() + sizeof layout, state.size() - sizeof layout);
  }
  if (layout != das::Mixture::kLayout || !index.load_state(states)) {
    throw nb::value_error("the state was not returned by state_dict() of this version of the index, or is damaged");
  }
}

nb::list counters(const das::SuffixIndex& index) {
  nb::list rows;
  for (std::size_t i = 0; i < das::kSources; ++i) {
    const auto source = static_cast<das::Source>(i);
    const das::SourceCounts counts = index.counts(source);
    rows.append(nb::make_tuple(name_of(source), counts.drafted, counts.verified, counts.accepted));
  }
  return rows;
}

nb::bytes bytes_of(const std::vector<das::TokenSources::Code>& codes) { return nb::bytes(codes.data(), codes.size()); }

nb::tuple close_request(das::SuffixIndex& index, std::int64_t handle) {
  das::ClosedRequest closed;
  {
    const nb::gil_scoped_release released;
    closed = index.close(handle);
  }
  const auto& [counts, codes, verified] = closed;
  return nb::make_tuple(counts.drafted, counts.accepted, counts.generated, bytes_of(codes),
                        nb::tuple(nb::cast(verified)));
}

nb::bytes count_step(das::SuffixIndex& index, std::int64_t handle, std::int64_t verified, std::int64_t accepted) {
  const std::size_t verified_tokens = check_budget(verified);
  const std::size_t accepted_tokens = check_budget(accepted);
  std::vector<das::TokenSources::Code> codes;
  {
    const nb::gil_scoped_release released;
    codes = index.count_step(handle, verified_tokens, accepted_tokens);
  }
  return bytes_of(codes);
}

nb::tuple verification_counts(const das::SuffixIndex& index) {
  const das::VerificationCounts& counts = index.verification_counts();
  const auto row = [](das::VerificationCounts::Counts one) { return nb::make_tuple(one.verified, one.accepted); };
  nb::list sources;
  nb::list positions;
  for (std::size_t i = 0; i < das::kSources; ++i) sources.append(row(counts.of(static_cast<das::Source>(i))));
  for (std::size_t i = 0; i < das::VerificationCounts::kPositions; ++i) positions.append(row(counts.at(i)));
  return nb::make_tuple(sources, positions);
}

// A request's lock, or that of the live texts of its problem, for tests of what others do while a thread holds it.
struct RequestLock {
  std::shared_ptr<das::Request> request;
  std::unique_lock<std::mutex> lock;
};

RequestLock lock_of(const das::SuffixIndex& index, std::int64_t handle, bool live_texts) {
  std::shared_ptr<das::Request> request = index.request(handle);
  std::mutex& mutex = live_texts ? request->problem->live : request->mutex;
  return {std::move(request), std::unique_lock(mutex, std::defer_lock)};
}

}  // namespace

NB_MODULE(_native, m) {
  // Engine processes exit by os._exit() or a signal while an index exists, which nanobind would report as a leak.
  nb::set_leak_warnings(false);
  m.doc() = "The native suffix index that rollout_worker.drafting.index wraps.";
  nb::register_exception_translator([](const std::exception_ptr& error, void*) {
    try {
      std::rethrow_exception(error);
    } catch (const das::UnknownRequest& unknown) {
      PyErr_SetString(PyExc_KeyError, unknown.what());
    }
  });

  nb::class_<das::Draft>(m, "Draft")
      .def_prop_ro("tokens", list_of([](const DraftToken& token) { return nb::int_(token.token); }))
      .def_prop_ro("probabilities", list_of([](const DraftToken& token) { return nb::float_(token.probability); }))
      .def_prop_ro("sources", list_of([](const DraftToken& token) { return nb::str(name_of(token.source)); }))
      .def_prop_ro("ages", list_of([](const DraftToken& token) {
                     return token.age < 0 ? nb::none() : nb::object(nb::int_(token.age));
                   }))
      .def_prop_ro("expected",
                   [](const das::Draft& draft) {
                     double survival = 1.0, expected = 0.0;
                     for (const DraftToken& token : draft.tokens) expected += survival *= token.probability;
                     return expected;
                   })
      .def_ro("match_length", &das::Draft::match_length)
      .def("__len__", [](const das::Draft& draft) { return draft.tokens.size(); })
      .def("__repr__", [](nb::handle_t<das::Draft> self) {
        return nb::str("Draft(tokens={!r}, probabilities={!r}, sources={!r}, ages={!r}, match_length={!r})")
            .format(self.attr("tokens"), self.attr("probabilities"), self.attr("sources"), self.attr("ages"),
                    self.attr("match_length"));
      });

  using released = nb::call_guard<nb::gil_scoped_release>;
  nb::class_<RequestLock>(m, "RequestLock")
      .def(
          "acquire", [](RequestLock& lock) { lock.lock.lock(); }, released())
      .def("release", [](RequestLock& lock) { lock.lock.unlock(); });

  nb::class_<das::SuffixIndex>(m, "SuffixIndex")
      .def(
          "__init__",
          [](das::SuffixIndex* index, std::size_t depth, std::size_t threads, std::size_t bytes, std::size_t pool,
             bool draft_ahead) { new (index) das::SuffixIndex(depth, threads, {bytes, pool}, draft_ahead); },
          nb::arg("depth"), nb::arg("threads"), nb::arg("max_bytes"), nb::arg("pool_tokens"), nb::arg("draft_ahead"))
      .def("add", &add, nb::arg("problem"), nb::arg("rollouts"))
      .def("set_rewards", &set_rewards, nb::arg("problem"), nb::arg("rewards"))
      .def("take_evicted", &das::SuffixIndex::take_evicted, released())
      .def("wait_idle", &das::SuffixIndex::wait_idle, released())
      .def("pool_tokens", &das::SuffixIndex::pool_tokens, released())
      .def("drop_rollout", &das::SuffixIndex::drop_rollout, nb::arg("problem"), nb::arg("rollout_id"), released())
      .def("drop_before", &das::SuffixIndex::drop_before, nb::arg("problem"), nb::arg("generation"), released())
      .def("drop_problem", &das::SuffixIndex::drop_problem, nb::arg("problem"), released())
      .def("problems", &das::SuffixIndex::problems, released())
      .def("rollouts", &das::SuffixIndex::rollouts, nb::arg("problem"), released())
      .def("tokens", &das::SuffixIndex::tokens, nb::arg("problem"), released())
      .def("total_bytes", [](const das::SuffixIndex& index) { return index.bytes(); })
      .def(
          "problem_bytes", [](das::SuffixIndex& index, std::string_view problem) { return index.bytes(problem); },
          nb::arg("problem"), released())
      .def(
          "open",
          [](das::SuffixIndex& index, const std::string& problem, nb::handle prompt, std::size_t context_length,
             std::array<bool, das::kSources> sources, nb::handle stop_tokens, std::array<std::int64_t, 4> limits) {
            return open(index, problem, prompt, context_length, {sources[0], sources[1], sources[2], sources[3]},
                        stop_tokens, {limits[0], limits[1], limits[2], limits[3]});
          },
          nb::arg("problem"), nb::arg("prompt").none(), nb::arg("context_length"), nb::arg("sources"),
          nb::arg("stop_tokens"), nb::arg("limits"))
      .def("extend", &extend, nb::arg("handle"), nb::arg("tokens").none())
      .def("extend_batch", &extend_batch, nb::arg("handles"), nb::arg("tokens"))
      .def("close", &close_request, nb::arg("handle"))
      .def("count_step", &count_step, nb::arg("handle"), nb::arg("verified"), nb::arg("accepted"))
      .def("num_tokens", &das::SuffixIndex::num_tokens, nb::arg("handle"), released())
      .def("look_ups",
           [](das::SuffixIndex& index) {
             das::LookUpCounts counts;
             {
               const nb::gil_scoped_release released;
               counts = index.look_ups();
             }
             return nb::make_tuple(counts.found, counts.computed, counts.omitted);
           })
      .def("draft", &draft, nb::arg("handle"), nb::arg("budget"), nb::arg("min_survival"))
      .def("draft_batch", &draft_batch, nb::arg("handles"), nb::arg("budgets"), nb::arg("min_survival"))
      .def("occurrences", &occurrences, nb::arg("handle"), nb::arg("length"))
      .def("text_position", &text_position, nb::arg("handle"))
      .def("has_ended", &das::SuffixIndex::has_ended, nb::arg("handle"), released())
      .def("state_dict", &state_dict)
      .def("load_state_dict", &load_state_dict, nb::arg("state"))
      .def("counters", &counters)
      .def("verification_counts", &verification_counts)
      .def("request_lock", &lock_of, nb::arg("handle"), nb::kw_only(), nb::arg("live_texts") = false);

  das::bind_batch(m);
}
