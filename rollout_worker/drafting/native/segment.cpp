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

// Contexts are read in whole words, so far beyond what is compared at most.
constexpr std::size_t kMargin = Words<std::uint16_t>::kTokens;

// Ids of real vocabularies are below this; others are rare and may cost more.
constexpr std::size_t kUsual = std::size_t{1} << 18;

// The tokens of some documents, each once, sorted.
std::vector<Token> distinct_tokens(std::span<const Document> documents) {
  std::vector<std::uint64_t> seen(kUsual / 64);
  std::vector<Token> tokens;
  std::vector<Token> rare;
  for (const Document& document : documents) {
    for (const Token token : document.tokens) {
      if (token >= kUsual) {
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

// Places of tokens in a dictionary, for many of them.
template <class Id>
class Places {
 public:
  explicit Places(std::span<const Token> dictionary) : dictionary_(dictionary) {
    for (std::size_t i = 0; i < dictionary.size() && dictionary[i] < kUsual; ++i) {
      table()[dictionary[i]] = static_cast<Id>(i);
    }
  }
  Id operator[](Token token) const {
    if (token < kUsual) return table()[token];
    return static_cast<Id>(std::lower_bound(dictionary_.begin(), dictionary_.end(), token) - dictionary_.begin());
  }

 private:
  // Never cleared: only tokens of the dictionary are asked for.
  static std::vector<Id>& table() {
    thread_local std::vector<Id> places(kUsual);
    return places;
  }
  std::span<const Token> dictionary_;
};

template <class Id, class Pos>
class SegmentOf final : public Segment {
 public:
  SegmentOf(const std::shared_ptr<ByteCounter>& counter, std::span<const Document> documents,
            std::span<const Token> dictionary, std::size_t text_length, std::size_t depth)
      : SegmentOf(counter, depth) {
    dictionary_.reserve(dictionary.size() + 1);
    dictionary_.assign(dictionary.begin(), dictionary.end());
    dictionary_.push_back(kStart);
    copy_text(documents, text_length);
    sort_positions();
  }

  std::size_t tokens() const override { return order_.size(); }

  bool contains_any(std::span<const std::uint64_t> numbers) const override {
    return std::any_of(documents_.begin(), documents_.end(), [&](const Entry& entry) {
      return std::binary_search(numbers.begin(), numbers.end(), entry.number);
    });
  }

  bool set_reward(std::uint64_t number, float reward) const override {
    const auto entry =
        std::find_if(documents_.begin(), documents_.end(), [&](const Entry& one) { return one.number == number; });
    if (entry == documents_.end()) return false;
    rewards_[static_cast<std::size_t>(entry - documents_.begin())].store(reward);
    return true;
  }

  void forget(std::uint32_t origin, std::optional<std::int64_t> before, std::span<const std::uint64_t> numbers,
              std::vector<std::uint64_t>& forgotten) const override {
    for (std::size_t i = 0; i < documents_.size(); ++i) {
      const Entry& entry = documents_[i];
      if (entry.origin != origin || entry.gone.load()) continue;
      const bool old = !before || generations_[i] < *before;
      if (!old && std::find(numbers.begin(), numbers.end(), entry.number) == numbers.end()) continue;
      forgotten.push_back(entry.number);
      entry.gone.store(true);
    }
  }

  // What is left of `source`.
  SegmentOf(const SegmentOf& source, std::span<const std::uint64_t> without)
      : SegmentOf(source.charge_.counter(), source.depth_) {
    const auto stays = [&](std::size_t document) {
      return !std::binary_search(without.begin(), without.end(), source.documents_[document].number);
    };
    std::size_t length = kMargin;
    std::size_t count = 0;
    std::size_t positions = 0;
    for (std::size_t i = 0; i < source.documents_.size(); ++i) {
      if (!stays(i)) continue;
      const std::size_t tokens = source.end_of(i) - source.begins_[i] - 1;
      length += depth_ + tokens + 2;
      positions += tokens - source.documents_[i].context;
      ++count;
    }
    dictionary_.assign(source.dictionary_.begin(), source.dictionary_.end());
    text_.reserve(length);
    text_.resize(kMargin, kNothing);
    reserve_documents(count);
    std::vector<Pos> moved(source.text_.size(), kGone);  // where each position is now
    for (std::size_t i = 0; i < source.documents_.size(); ++i) {
      if (!stays(i)) continue;
      text_.resize(text_.size() + depth_, kNothing);
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
      std::uint8_t shared = kDeepest;  // with the last position that is left
      for (std::size_t i = source.buckets_[token]; i < source.buckets_[token + 1]; ++i) {
        const Pos position = moved[source.order_[i]];
        shared = std::min(shared, source.common_[i]);
        if (position == kGone) continue;
        order_[kept] = position;
        common_[kept++] = shared;
        shared = kDeepest;
      }
      buckets_.push_back(static_cast<Pos>(kept));
    }
  }

  std::shared_ptr<const Segment> without(std::span<const std::uint64_t> numbers) const override {
    return std::make_shared<const SegmentOf>(*this, numbers);
  }

  void copy_documents(std::vector<Document>& documents, std::vector<std::unique_ptr<Token[]>>& text) const override {
    for (std::size_t i = 0; i < documents_.size(); ++i) {
      const Entry& entry = documents_[i];
      if (entry.gone.load()) continue;
      const std::size_t length = end_of(i) - begins_[i] - 1;
      auto copy = std::make_unique<Token[]>(length);
      for (std::size_t k = 0; k < length; ++k) copy[k] = dictionary_[text_[begins_[i] + 1 + k]];
      documents.push_back(
          {generations_[i], entry.number, entry.context, {copy.get(), length}, rewards_[i].load(), entry.origin});
      text.push_back(std::move(copy));
    }
  }

  void find_longest(std::span<const Token> context, std::size_t limit, std::vector<Occurrence>& found) const override {
    walk(context, limit, [&](std::size_t place, std::size_t match) {
      found.push_back(occurrence(place, match, Source::history, document_of(order_[place])));
      return true;
    });
  }

  void find_foreign(std::span<const Token> context, std::uint32_t origin, std::size_t limit,
                    std::vector<Occurrence>& found) const override {
    std::size_t left = limit;
    walk(context, kForeignWalk * limit, [&](std::size_t place, std::size_t match) {
      const std::size_t document = document_of(order_[place]);
      const Entry& entry = documents_[document];
      if (entry.origin == origin || entry.gone.load()) return true;
      found.push_back(occurrence(place, match, Source::foreign, document));
      return --left > 0;
    });
  }

  std::optional<std::size_t> position_of(const Occurrence& occurrence) const override {
    if (occurrence.text.dictionary() != dictionary_.data()) return std::nullopt;
    return static_cast<std::size_t>(static_cast<const Id*>(occurrence.text.place()) - text_.data());
  }

  std::optional<Occurrence> find_near(std::size_t anchor, std::size_t since,
                                      std::span<const Token> context) const override {
    const Id newest = place_of(context.back());
    if (newest == kUnknown) return std::nullopt;
    const std::size_t document = document_of(static_cast<Pos>(anchor));
    const std::size_t position = anchor + since;  // perhaps behind the document
    const std::size_t first = std::size_t{begins_[document]} + 1 + documents_[document].context;
    const std::size_t last = end_of(document);  // behind which nothing follows
    const std::size_t from = std::max(first, position - std::min(position, kNear));
    const std::size_t to = std::min(last, position + kNear + 1);
    Wanted wanted(*this, context);
    std::size_t best = 0;
    std::size_t longest = 0;
    for (std::size_t p = from; p < to; ++p) {
      if (text_[p - 1] != newest) continue;
      const std::size_t match = wanted.match(wanted.common(text_.data() + p, 1));
      const auto distance = [&](std::size_t place) { return place > position ? place - position : position - place; };
      if (match < longest || (match == longest && distance(p) >= distance(best))) continue;
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
  static constexpr std::size_t kNear = 32;
  static constexpr Id kUnknown = std::numeric_limits<Id>::max();
  static constexpr Id kNothing = kUnknown - 1;  // stands before a text, and is in none
  static constexpr Pos kGone = 0;               // stands before all positions
  static constexpr std::size_t kForeignWalk = 8;

  // Calls visit(place in order_, tokens shared) for at most `limit` positions, those that share most with `context`
  // first, until it returns false.
  template <class Visit>
  void walk(std::span<const Token> context, std::size_t limit, Visit visit) const {
    const Id newest = place_of(context.back());
    if (newest == kUnknown) return;
    const std::size_t first = buckets_[newest];
    const std::size_t last = buckets_[newest + 1];
    if (first == last) return;
    Wanted wanted(*this, context);

    // The first position whose context is not smaller than what is wanted, and how much its neighbours share with it.
    std::size_t inside = first;
    std::size_t outside = last;
    std::size_t before = 1;
    std::size_t behind = 1;
    while (inside < outside) {
      const std::size_t middle = inside + (outside - inside) / 2;
      const Id* const end = text_.data() + order_[middle];
      const std::size_t shared = wanted.common(end, std::min(before, behind));
      if (shared < depth_ && end[-1 - static_cast<std::ptrdiff_t>(shared)] < wanted.at(shared)) {
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
        if (!visit(right, wanted.match(behind))) return;
        ++right;
        behind = right < last ? std::min<std::size_t>(behind, common_[right]) : 0;
      } else {
        --left;
        if (!visit(left, wanted.match(before))) return;
        before = left > first ? std::min<std::size_t>(before, common_[left]) : 0;
      }
    }
  }

  // A context in places of the dictionary, which are looked up as far as they are needed.
  class Wanted {
   public:
    Wanted(const SegmentOf& segment, std::span<const Token> context)
        : segment_(segment),
          context_(context),
          length_(std::min(context.size(), segment.depth_)),
          beyond_(context.front() == kStart ? kNothing : kUnknown) {}

    // How many of `common` are tokens of its own.
    std::size_t match(std::size_t common) const { return std::min(common, length_); }

    // How many newest tokens it shares with the context that ends at `end`, as well as what stands before its first one
    // where that is kStart; the first `known` are known to be the same.
    std::size_t common(const Id* end, std::size_t known) {
      for (std::size_t d = known; d < segment_.depth_; d += Words<Id>::kTokens) {
        look_up(std::min(segment_.depth_, d + Words<Id>::kTokens), end);
        const std::uint64_t x = Words<Id>::before(end - d);
        const std::uint64_t y = Words<Id>::before(newest() - d);
        if (x != y) return std::min(segment_.depth_, d + Words<Id>::common(x, y));
      }
      return segment_.depth_;
    }

    // The place of the i-th newest token; it was compared.
    Id at(std::size_t i) const { return newest()[-1 - static_cast<std::ptrdiff_t>(i)]; }

   private:
    const Id* newest() const { return places_.data() + places_.size(); }

    // Most tokens are what stands in the context that is compared, so that their places are seen there.
    void look_up(std::size_t count, const Id* end) {
      for (; known_ < count; ++known_) {
        Id& place = places_[places_.size() - 1 - known_];
        if (known_ >= length_) {
          place = beyond_;
          continue;
        }
        const Token token = context_[context_.size() - 1 - known_];
        const Id there = end[-1 - static_cast<std::ptrdiff_t>(known_)];
        const bool seen = there < segment_.dictionary_.size() && segment_.dictionary_[there] == token;
        place = seen ? there : segment_.place_of(token);
      }
    }

    const SegmentOf& segment_;
    std::span<const Token> context_;
    std::size_t length_;
    Id beyond_;
    std::size_t known_ = 0;
    // Beyond the depth some are read and not looked at.
    std::array<Id, kDeepest + Words<std::uint16_t>::kTokens> places_{};
  };

 public:
  // Places in the dictionary must stay below.
  static constexpr std::size_t kMaxDistinct = kNothing - 1;

 private:
  // A value that may change while others read.
  template <class T>
  struct Told {
    explicit Told(T first) : value(first) {}
    Told(const Told& other) : value(other.load()) {}
    Told& operator=(const Told&) = delete;
    T load() const { return value.load(std::memory_order_relaxed); }
    void store(T next) const { value.store(next, std::memory_order_relaxed); }
    mutable std::atomic<T> value;
  };

  // What is known of a document and seldom looked at.
  struct Entry {
    std::uint64_t number;
    std::uint32_t origin;
    Pos context;
    Told<bool> gone;
  };

  SegmentOf(const std::shared_ptr<ByteCounter>& counter, std::size_t depth)
      : charge_(counter, sizeof(SegmentOf)),
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
    const auto start = static_cast<Id>(dictionary_.size() - 1);
    const Places<Id> places({dictionary_.data(), dictionary_.size() - 1});
    text_.reserve(text_length);
    text_.resize(kMargin, kNothing);
    reserve_documents(documents.size());
    for (const Document& document : documents) {
      text_.resize(text_.size() + depth_, kNothing);
      begins_.push_back(static_cast<Pos>(text_.size()));
      generations_.push_back(document.generation);
      rewards_.emplace_back(document.reward);
      documents_.push_back({document.number, document.origin, static_cast<Pos>(document.context), Told<bool>(false)});
      text_.push_back(start);
      for (const Token token : document.tokens) text_.push_back(places[token]);
      text_.push_back(start);
    }
  }

  // Calls visit(p) for every position that can be drafted from, later ones first.
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

  std::size_t end_of(std::size_t document) const {  // where the kStart behind it stands
    return (document + 1 < begins_.size() ? begins_[document + 1] - depth_ : text_.size()) - 1;
  }

  Id place_of(Token token) const {
    const auto place = std::lower_bound(dictionary_.begin(), dictionary_.end(), token);  // the last one is kStart
    return *place == token ? static_cast<Id>(place - dictionary_.begin()) : kUnknown;
  }

  Occurrence occurrence(std::size_t place, std::size_t match, Source source, std::size_t document) const {
    const Id* const next = text_.data() + order_[place];
    __builtin_prefetch(next);  // voted on after all have been found
    return {Continuation(next, dictionary_.data()), generations_[document], rewards_[document].load(),
            static_cast<std::uint8_t>(match), source};
  }

  std::size_t document_of(Pos position) const {
    // As std::upper_bound, without branches that nobody can foretell.
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
  std::pmr::vector<Token> dictionary_;  // sorted; the last is kStart
  // Each document between two kStart, behind as many kNothing as are compared: where two contexts reach the beginning
  // of a document they are the same, and the later, newer one comes first.
  std::pmr::vector<Id> text_;
  std::pmr::vector<Pos> order_;
  std::pmr::vector<std::uint8_t> common_;
  std::pmr::vector<Pos> buckets_;  // where in order_ the contexts begin that end with a token
  std::pmr::vector<Pos> begins_;   // where the kStart of each document stands
  std::pmr::vector<std::int64_t> generations_;
  std::pmr::vector<Told<float>> rewards_;
  std::pmr::vector<Entry> documents_;
};

}  // namespace

std::uint64_t Segment::next_serial() {
  static std::atomic<std::uint64_t> next{0};
  return next.fetch_add(1, std::memory_order_relaxed);
}

std::shared_ptr<const Segment> Segment::build(const std::shared_ptr<ByteCounter>& counter,
                                              std::span<const Document> documents, std::size_t depth) {
  using Narrow = SegmentOf<std::uint16_t, std::uint16_t>;
  using Middle = SegmentOf<std::uint16_t, std::uint32_t>;
  using Wide = SegmentOf<std::uint32_t, std::uint32_t>;
  std::size_t length = kMargin;
  for (const Document& document : documents) length += depth + document.tokens.size() + 2;
  if (length > std::numeric_limits<std::uint32_t>::max()) {
    throw std::length_error("a problem's segment would hold more than 2^32 tokens");
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
