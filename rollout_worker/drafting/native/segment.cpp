#include "segment.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <limits>
#include <memory_resource>
#include <numeric>
#include <stdexcept>

#include "context_sort.hpp"

namespace das {

namespace {

// Contexts are read in whole words, so up to this many tokens beyond the compared ones are read.
constexpr std::size_t kReadMargin = Words<std::uint16_t>::kTokens;

// The token ids of real vocabularies are below this. Larger ids are rare and may be slower.
constexpr std::size_t kCommonIds = std::size_t{1} << 18;

// Returns the distinct tokens of some documents, sorted.
std::vector<Token> distinct_tokens(std::span<const Document> documents) {
  std::vector<std::uint64_t> seen(kCommonIds / 64);
  std::vector<Token> tokens;
  std::vector<Token> rare;
  for (const Document& document : documents) {
    for (const Token token : document.tokens) {
      if (token >= kCommonIds) {
        rare.push_back(token);
        continue;
      }
      std::uint64_t& word = seen[token / 64];
      const std::uint64_t bit = std::uint64_t{1} << token % 64;
      if ((word & bit) == 0) {
        word |= bit;
        tokens.push_back(token);
      }
    }
  }
  std::sort(tokens.begin(), tokens.end());
  std::sort(rare.begin(), rare.end());
  tokens.insert(tokens.end(), rare.begin(), std::unique(rare.begin(), rare.end()));
  return tokens;
}

// Looks up the dictionary indices of many tokens.
template <class Id>
class DictionaryLookup {
 public:
  explicit DictionaryLookup(std::span<const Token> dictionary) : dictionary_(dictionary) {
    for (std::size_t i = 0; i < dictionary.size() && dictionary[i] < kCommonIds; ++i) {
      table()[dictionary[i]] = static_cast<Id>(i);
    }
  }
  Id operator[](Token token) const {
    if (token < kCommonIds) return table()[token];
    return static_cast<Id>(std::lower_bound(dictionary_.begin(), dictionary_.end(), token) - dictionary_.begin());
  }

 private:
  // Never cleared, because only tokens of the dictionary are looked up.
  static std::vector<Id>& table() {
    thread_local std::vector<Id> indices(kCommonIds);
    return indices;
  }
  std::span<const Token> dictionary_;
};

template <class Id, class Pos>
class TypedSegment final : public Segment {
 public:
  TypedSegment(const std::shared_ptr<ByteCounter>& counter, std::span<const Document> documents,
               std::span<const Token> dictionary, std::size_t text_length, std::size_t depth)
      : TypedSegment(counter, depth) {
    dictionary_.reserve(dictionary.size() + 1);
    dictionary_.assign(dictionary.begin(), dictionary.end());
    dictionary_.push_back(kBoundary);
    copy_text(documents, text_length);
    sort_positions();
  }

  std::size_t tokens() const override { return order_.size(); }

  bool contains_any(std::span<const std::uint64_t> ids) const override {
    return std::any_of(documents_.begin(), documents_.end(),
                       [&](const Entry& entry) { return std::binary_search(ids.begin(), ids.end(), entry.id); });
  }

  bool set_reward(std::uint64_t id, float reward) const override {
    const auto entry =
        std::find_if(documents_.begin(), documents_.end(), [&](const Entry& entry) { return entry.id == id; });
    if (entry == documents_.end()) return false;
    rewards_[static_cast<std::size_t>(entry - documents_.begin())].store(reward);
    return true;
  }

  void remove(std::uint32_t problem_hash, std::optional<std::int64_t> before, std::span<const std::uint64_t> ids,
              std::vector<std::uint64_t>& removed) const override {
    for (std::size_t i = 0; i < documents_.size(); ++i) {
      const Entry& entry = documents_[i];
      if (entry.problem_hash != problem_hash || entry.is_removed.load()) continue;
      const bool is_old = !before || generations_[i] < *before;
      if (!is_old && std::find(ids.begin(), ids.end(), entry.id) == ids.end()) continue;
      removed.push_back(entry.id);
      entry.is_removed.store(true);
    }
  }

  // Copies `source` without some documents, given by their sorted ids.
  TypedSegment(const TypedSegment& source, std::span<const std::uint64_t> without)
      : TypedSegment(source.charge_.counter(), source.depth_) {
    const auto is_kept = [&](std::size_t document) {
      return !std::binary_search(without.begin(), without.end(), source.documents_[document].id);
    };
    std::size_t length = kReadMargin;
    std::size_t count = 0;
    std::size_t positions = 0;
    for (std::size_t i = 0; i < source.documents_.size(); ++i) {
      if (!is_kept(i)) continue;
      const std::size_t tokens = source.end_of(i) - source.begins_[i] - 1;
      length += depth_ + tokens + 2;
      positions += tokens - source.documents_[i].context;
      ++count;
    }
    dictionary_.assign(source.dictionary_.begin(), source.dictionary_.end());
    text_.reserve(length);
    text_.resize(kReadMargin, kPadding);
    reserve_documents(count);
    std::vector<Pos> moved(source.text_.size(), kNoPosition);  // the new position of each old one
    for (std::size_t i = 0; i < source.documents_.size(); ++i) {
      if (!is_kept(i)) continue;
      text_.resize(text_.size() + depth_, kPadding);
      const auto begin = static_cast<std::ptrdiff_t>(source.begins_[i]);
      const auto end = static_cast<std::ptrdiff_t>(source.end_of(i)) + 1;
      std::iota(moved.begin() + begin, moved.begin() + end, static_cast<Pos>(text_.size()));
      begins_.push_back(static_cast<Pos>(text_.size()));
      generations_.push_back(source.generations_[i]);
      rewards_.push_back(source.rewards_[i]);
      documents_.push_back(source.documents_[i]);
      text_.insert(text_.end(), source.text_.begin() + begin, source.text_.begin() + end);
    }
    order_.resize(positions);
    common_.resize(positions);
    buckets_.reserve(source.buckets_.size());
    buckets_.push_back(0);
    std::size_t kept = 0;
    for (std::size_t token = 0; token + 1 < source.buckets_.size(); ++token) {
      std::uint8_t shared = kMaxDepth;  // number of tokens shared with the last position that was kept
      for (std::size_t i = source.buckets_[token]; i < source.buckets_[token + 1]; ++i) {
        const Pos position = moved[source.order_[i]];
        shared = std::min(shared, source.common_[i]);
        if (position == kNoPosition) continue;
        order_[kept] = position;
        common_[kept++] = shared;
        shared = kMaxDepth;
      }
      buckets_.push_back(static_cast<Pos>(kept));
    }
  }

  std::shared_ptr<const Segment> without(std::span<const std::uint64_t> ids) const override {
    return std::make_shared<const TypedSegment>(*this, ids);
  }

  void copy_documents(std::vector<Document>& documents, std::vector<std::unique_ptr<Token[]>>& text) const override {
    for (std::size_t i = 0; i < documents_.size(); ++i) {
      const Entry& entry = documents_[i];
      if (entry.is_removed.load()) continue;
      const std::size_t length = end_of(i) - begins_[i] - 1;
      auto copy = std::make_unique<Token[]>(length);
      for (std::size_t k = 0; k < length; ++k) copy[k] = dictionary_[text_[begins_[i] + 1 + k]];
      documents.push_back(
          {generations_[i], entry.id, entry.context, {copy.get(), length}, rewards_[i].load(), entry.problem_hash});
      text.push_back(std::move(copy));
    }
  }

  void find_longest(std::span<const Token> context, std::size_t limit, std::size_t min_match,
                    std::vector<Occurrence>& found) const override {
    visit_longest(context, limit, [&](std::size_t index, std::size_t match) {
      if (match < min_match) return false;
      found.push_back(occurrence(index, match, Source::history, document_of(order_[index])));
      return true;
    });
  }

  void find_cross_problem(std::span<const Token> context, std::uint32_t problem_hash, std::size_t limit,
                          std::size_t min_match, std::vector<Occurrence>& found) const override {
    std::size_t remaining = limit;
    visit_longest(context, kMaxVisitedFactor * limit, [&](std::size_t index, std::size_t match) {
      if (match < min_match) return false;
      const std::size_t document = document_of(order_[index]);
      const Entry& entry = documents_[document];
      if (entry.problem_hash == problem_hash || entry.is_removed.load()) return true;
      found.push_back(occurrence(index, match, Source::cross_problem, document));
      return --remaining > 0;
    });
  }

  std::optional<std::size_t> position_of(const Occurrence& occurrence) const override {
    if (occurrence.text.dictionary() != dictionary_.data()) return std::nullopt;
    return static_cast<std::size_t>(static_cast<const Id*>(occurrence.text.address()) - text_.data());
  }

  std::optional<Occurrence> find_near(std::size_t anchor, std::size_t distance,
                                      std::span<const Token> context) const override {
    const Id newest = index_of(context.back());
    if (newest == kUnknown) return std::nullopt;
    const std::size_t document = document_of(static_cast<Pos>(anchor));
    const std::size_t expected = anchor + distance;  // possibly beyond the end of the document
    const std::size_t first = std::size_t{begins_[document]} + 1 + documents_[document].context;
    const std::size_t last = end_of(document);  // no token follows the position end_of(document)
    const std::size_t from = std::max(first, expected - std::min(expected, kMaxDeviation));
    const std::size_t to = std::min(last, expected + kMaxDeviation + 1);
    Query query(*this, context);
    std::size_t best = 0;
    std::size_t longest = 0;
    for (std::size_t p = from; p < to; ++p) {
      if (text_[p - 1] != newest) continue;
      const std::size_t match = query.match(query.common(text_.data() + p, 1));
      const auto deviation = [&](std::size_t at) { return at > expected ? at - expected : expected - at; };
      if (match < longest || (match == longest && deviation(p) >= deviation(best))) continue;
      best = p;
      longest = match;
    }
    if (longest == 0) return std::nullopt;
    return Occurrence{Continuation(text_.data() + best, dictionary_.data()),
                      generations_[document],
                      rewards_[document].load(),
                      static_cast<std::uint8_t>(longest),
                      Source::history,
                      true};
  }

 private:
  static constexpr std::size_t kMaxDeviation = 32;  // tokens before and after the expected position in find_near()
  static constexpr Id kUnknown = std::numeric_limits<Id>::max();  // the index of tokens that the dictionary lacks
  static constexpr Id kPadding = kUnknown - 1;                    // fills the space before each document
  static constexpr Pos kNoPosition = 0;                           // lies in the padding
  static constexpr std::size_t kMaxVisitedFactor = 8;             // times the limit of find_cross_problem()

  // Calls visit(index in order_, number of shared tokens) for at most `limit` positions, in descending order of the
  // number of tokens that they share with `context`, until it returns false.
  template <class Visit>
  void visit_longest(std::span<const Token> context, std::size_t limit, Visit visit) const {
    const Id newest = index_of(context.back());
    if (newest == kUnknown) return;
    const std::size_t first = buckets_[newest];
    const std::size_t last = buckets_[newest + 1];
    if (first == last) return;
    Query query(*this, context);

    // Find the first position whose context is not smaller than the query, and how much it and the one before it share
    // with the query.
    std::size_t inside = first;
    std::size_t outside = last;
    std::size_t before = 1;
    std::size_t behind = 1;
    while (inside < outside) {
      const std::size_t middle = inside + (outside - inside) / 2;
      const Id* const end = text_.data() + order_[middle];
      const std::size_t shared = query.common(end, std::min(before, behind));
      if (shared < depth_ && end[-1 - static_cast<std::ptrdiff_t>(shared)] < query.at(shared)) {
        inside = middle + 1;
        before = shared;
      } else {
        outside = middle;
        behind = shared;
      }
    }

    std::size_t left = inside;
    std::size_t right = inside;
    before = left > first ? before : 0;
    behind = right < last ? behind : 0;
    for (std::size_t count = 0; count < limit && (before > 0 || behind > 0); ++count) {
      if (behind >= before) {
        if (!visit(right, query.match(behind))) return;
        ++right;
        behind = right < last ? std::min<std::size_t>(behind, common_[right]) : 0;
      } else {
        --left;
        if (!visit(left, query.match(before))) return;
        before = left > first ? std::min<std::size_t>(before, common_[left]) : 0;
      }
    }
  }

  // A context as dictionary indices, which are looked up lazily.
  class Query {
   public:
    Query(const TypedSegment& segment, std::span<const Token> context)
        : segment_(segment),
          context_(context),
          length_(std::min(context.size(), segment.depth_)),
          filler_(context.front() == kBoundary ? kPadding : kUnknown) {}

    // Limits a number of shared tokens to the length of the context.
    std::size_t match(std::size_t common) const { return std::min(common, length_); }

    // Returns how many newest tokens the query shares with the context that ends at `end`, given that the first `known`
    // are equal. If the query starts with kBoundary, the padding before it counts as shared, too.
    std::size_t common(const Id* end, std::size_t known) {
      for (std::size_t d = known; d < segment_.depth_; d += Words<Id>::kTokens) {
        look_up(std::min(segment_.depth_, d + Words<Id>::kTokens), end);
        const std::uint64_t x = Words<Id>::before(end - d);
        const std::uint64_t y = Words<Id>::before(newest() - d);
        if (x != y) return std::min(segment_.depth_, d + Words<Id>::common(x, y));
      }
      return segment_.depth_;
    }

    // Returns the index of the i-th newest token, which must have been compared before.
    Id at(std::size_t i) const { return newest()[-1 - static_cast<std::ptrdiff_t>(i)]; }

   private:
    const Id* newest() const { return indices_.data() + indices_.size(); }

    // Most tokens are equal to those of the compared context, so that their indices can be read there.
    void look_up(std::size_t count, const Id* end) {
      for (; known_ < count; ++known_) {
        Id& index = indices_[indices_.size() - 1 - known_];
        if (known_ >= length_) {
          index = filler_;
          continue;
        }
        const Token token = context_[context_.size() - 1 - known_];
        const Id candidate = end[-1 - static_cast<std::ptrdiff_t>(known_)];
        const bool is_equal = candidate < segment_.dictionary_.size() && segment_.dictionary_[candidate] == token;
        index = is_equal ? candidate : segment_.index_of(token);
      }
    }

    const TypedSegment& segment_;
    std::span<const Token> context_;
    std::size_t length_;
    Id filler_;  // stands for tokens before the beginning of the context
    std::size_t known_ = 0;
    // Some indices beyond the depth are read, but do not matter.
    std::array<Id, kMaxDepth + Words<std::uint16_t>::kTokens> indices_{};
  };

 public:
  // The dictionary must be smaller than this.
  static constexpr std::size_t kMaxDistinct = kPadding - 1;

 private:
  // A value that may change while other threads read it.
  template <class T>
  struct Relaxed {
    explicit Relaxed(T initial) : value(initial) {}
    Relaxed(const Relaxed& other) : value(other.load()) {}
    Relaxed& operator=(const Relaxed&) = delete;
    T load() const { return value.load(std::memory_order_relaxed); }
    void store(T next) const { value.store(next, std::memory_order_relaxed); }
    mutable std::atomic<T> value;
  };

  // The rarely used properties of a document.
  struct Entry {
    std::uint64_t id;
    std::uint32_t problem_hash;
    Pos context;
    Relaxed<bool> is_removed;
  };

  TypedSegment(const std::shared_ptr<ByteCounter>& counter, std::size_t depth)
      : charge_(counter, sizeof(TypedSegment)),
        depth_(depth),
        dictionary_(counter.get()),
        text_(counter.get()),
        order_(counter.get()),
        common_(counter.get()),
        buckets_(counter.get()),
        begins_(counter.get()),
        generations_(counter.get()),
        rewards_(counter.get()),
        documents_(counter.get()) {}

  void reserve_documents(std::size_t count) {
    begins_.reserve(count);
    generations_.reserve(count);
    rewards_.reserve(count);
    documents_.reserve(count);
  }

  void copy_text(std::span<const Document> documents, std::size_t text_length) {
    const auto boundary = static_cast<Id>(dictionary_.size() - 1);
    const DictionaryLookup<Id> lookup({dictionary_.data(), dictionary_.size() - 1});
    text_.reserve(text_length);
    text_.resize(kReadMargin, kPadding);
    reserve_documents(documents.size());
    for (const Document& document : documents) {
      text_.resize(text_.size() + depth_, kPadding);
      begins_.push_back(static_cast<Pos>(text_.size()));
      generations_.push_back(document.generation);
      rewards_.emplace_back(document.reward);
      documents_.push_back(
          {document.id, document.problem_hash, static_cast<Pos>(document.context), Relaxed<bool>(false)});
      text_.push_back(boundary);
      for (const Token token : document.tokens) text_.push_back(lookup[token]);
      text_.push_back(boundary);
    }
  }

  // Calls visit(p) for every position outside contexts, later ones first.
  template <class Visit>
  void for_each_position(Visit visit) const {
    for (std::size_t i = documents_.size(); i-- > 0;) {
      const std::size_t first = std::size_t{begins_[i]} + 1 + documents_[i].context;
      for (std::size_t p = end_of(i); p-- > first;) visit(p);
    }
  }

  void sort_positions() {
    buckets_.resize(dictionary_.size() + 1);
    for_each_position([&](std::size_t p) { ++buckets_[text_[p - 1] + std::size_t{1}]; });
    for (std::size_t i = 1; i < buckets_.size(); ++i) buckets_[i] = static_cast<Pos>(buckets_[i] + buckets_[i - 1]);
    order_.resize(buckets_.back());
    common_.resize(buckets_.back());
    std::vector<Pos> next(buckets_.begin(), buckets_.end() - 1);
    for_each_position([&](std::size_t p) { order_[next[text_[p - 1]]++] = static_cast<Pos>(p); });
    ContextSort<Id, Pos> sort(text_.data(), depth_, order_.data(), common_.data());
    for (std::size_t i = 0; i + 1 < buckets_.size(); ++i) sort.sort(buckets_[i], buckets_[i + 1]);
  }

  // Returns the position of the kBoundary after a document.
  std::size_t end_of(std::size_t document) const {
    return (document + 1 < begins_.size() ? begins_[document + 1] - depth_ : text_.size()) - 1;
  }

  Id index_of(Token token) const {
    // The search never reaches the end, because the last entry is kBoundary.
    const auto entry = std::lower_bound(dictionary_.begin(), dictionary_.end(), token);
    return *entry == token ? static_cast<Id>(entry - dictionary_.begin()) : kUnknown;
  }

  Occurrence occurrence(std::size_t index, std::size_t match, Source source, std::size_t document) const {
    const Id* const next = text_.data() + order_[index];
    __builtin_prefetch(next);  // the mixture reads it after all occurrences have been found
    return {Continuation(next, dictionary_.data()), generations_[document], rewards_[document].load(),
            static_cast<std::uint8_t>(match), source};
  }

  std::size_t document_of(Pos position) const {
    // Like std::upper_bound, but without unpredictable branches.
    const Pos* first = begins_.data();
    for (std::size_t count = begins_.size(); count > 1;) {
      const std::size_t half = count / 2;
      first += first[half] <= position ? half : 0;
      count -= half;
    }
    return static_cast<std::size_t>(first - begins_.data());
  }

  Charge charge_;
  std::size_t depth_;
  std::pmr::vector<Token> dictionary_;  // sorted; the last entry is kBoundary
  // Each document is enclosed in two kBoundary and preceded by kPadding for the whole depth. Contexts that reach the
  // beginning of their documents therefore compare as equal, and the later, newer one comes first.
  std::pmr::vector<Id> text_;
  std::pmr::vector<Pos> order_;
  std::pmr::vector<std::uint8_t> common_;
  std::pmr::vector<Pos> buckets_;  // by dictionary index: where in order_ the contexts begin that end with this token
  std::pmr::vector<Pos> begins_;   // the position of the kBoundary before each document
  std::pmr::vector<std::int64_t> generations_;
  std::pmr::vector<Relaxed<float>> rewards_;
  std::pmr::vector<Entry> documents_;
};

}  // namespace

std::uint64_t Segment::next_serial() {
  static std::atomic<std::uint64_t> next{0};
  return next.fetch_add(1, std::memory_order_relaxed);
}

std::shared_ptr<const Segment> Segment::build(const std::shared_ptr<ByteCounter>& counter,
                                              std::span<const Document> documents, std::size_t depth) {
  using Narrow = TypedSegment<std::uint16_t, std::uint16_t>;
  using Middle = TypedSegment<std::uint16_t, std::uint32_t>;
  using Wide = TypedSegment<std::uint32_t, std::uint32_t>;
  std::size_t length = kReadMargin;
  for (const Document& document : documents) length += depth + document.tokens.size() + 2;
  if (length > std::numeric_limits<std::uint32_t>::max()) {
    throw std::length_error("a segment of the suffix index would exceed 2^32 tokens");
  }
  const std::vector<Token> dictionary = distinct_tokens(documents);
  if (dictionary.size() >= Narrow::kMaxDistinct) {
    return std::make_shared<const Wide>(counter, documents, dictionary, length, depth);
  }
  if (length > std::numeric_limits<std::uint16_t>::max()) {
    return std::make_shared<const Middle>(counter, documents, dictionary, length, depth);
  }
  return std::make_shared<const Narrow>(counter, documents, dictionary, length, depth);
}

}  // namespace das
