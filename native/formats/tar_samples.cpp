#include "formats/tar_samples.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>
#include <optional>

namespace pgasdl {
namespace {

constexpr std::uint64_t kBlock = 512;

std::string_view text(const std::uint8_t* at, std::size_t size) {
  return {reinterpret_cast<const char*>(at), size};
}

std::optional<std::uint64_t> octal(std::string_view digits) {
  std::uint64_t number = 0;
  for (const char digit : digits) {
    if (digit < '0' || digit > '7') return std::nullopt;
    number = 8 * number + (digit - '0');
  }
  return number;
}

// The size in a header that is sound and has its numbers as programs write them.
std::optional<std::uint64_t> size_of(const std::uint8_t* header) {
  const auto size = octal(text(header + 124, 11));
  const auto wanted = octal(text(header + 148, 6));
  if (!size || !wanted || (header[135] != 0 && header[135] != ' ')) return std::nullopt;
  // A checksum takes its own field as blanks.
  std::uint64_t sum = std::accumulate(header, header + kBlock, std::uint64_t{8 * ' '});
  sum -= std::accumulate(header + 148, header + 156, std::uint64_t{0});
  return sum == *wanted ? size : std::nullopt;
}

// A tar is one by its first header: nothing in it may be odd.
bool is_strict(const std::uint8_t* header) {
  constexpr std::array<std::pair<int, int>, 6> kNumbers{
      {{100, 8}, {108, 8}, {116, 8}, {136, 12}, {329, 8}, {337, 8}}};
  if (header[154] != 0 && header[154] != ' ') return false;  // behind the checksum
  return std::all_of(kNumbers.begin(), kNumbers.end(), [header](const auto& field) {
    const std::string_view whole = text(header + field.first, field.second);
    const std::size_t end = std::min(whole.find_first_of(std::string_view("\0 ", 2)), whole.size());
    return octal(whole.substr(0, end)) && (end == whole.size() || whole[end] == 0 ||
                                           end + 1 == whole.size() || whole[end + 1] == 0);
  });
}

// Whether a pax header has nothing of interest: as a rule, times that have fractions.
bool is_harmless(std::string_view records) {
  constexpr std::array<std::string_view, 7> kKeys{"mtime", "atime", "ctime", "uid",
                                                  "gid",   "uname", "gname"};
  while (!records.empty()) {
    const std::size_t blank = records.find_first_not_of("0123456789");
    if (blank == 0 || blank == records.npos || records[blank] != ' ') return false;
    records.remove_prefix(blank + 1);
    const std::size_t equal = records.find('=');
    const std::size_t end = records.find('\n', std::min(equal, records.size()));
    if (end == records.npos) return false;
    if (std::find(kKeys.begin(), kKeys.end(), records.substr(0, equal)) == kKeys.end())
      return false;
    records.remove_prefix(end + 1);
  }
  return true;
}

// What webdataset keeps for itself: "__name__", and all in such a folder.
bool is_meta(std::string_view name) {
  const std::string_view first = name.substr(0, name.find('/'));
  return first.size() >= 4 && first.starts_with("__") && first.ends_with("__");
}

// Where the dot is between key and extension: the first one of the last part that is not its first
// letter; or is, behind a folder without a dot. npos: it is no field.
std::size_t dot_of(std::string_view name) {
  const std::size_t slash = name.rfind('/');
  const std::size_t begin = slash == name.npos ? 0 : slash + 1;
  const std::size_t dot = name.find('.', begin);
  if (dot != begin || dot == name.npos) return dot;
  if (slash == name.npos) return name.npos;
  const std::string_view above = name.substr(0, slash);
  return above.find('.', above.rfind('/') + 1) == name.npos ? dot : name.npos;
}

}  // namespace

TarSamples::Stop TarSamples::walk(const std::uint8_t* data, std::size_t size, std::uint64_t begin) {
  const auto block = [&](std::uint64_t offset) -> const std::uint8_t* {
    if (offset < begin || size < kBlock || offset - begin > size - kBlock) return nullptr;
    return data + (offset - begin);
  };
  for (;;) {
    const std::uint8_t* header = block(offset_);
    if (!header) return Stop::kMore;
    if (header[0] == 0 && std::all_of(header, header + kBlock, [](auto b) { return b == 0; }))
      return Stop::kEnd;
    if (offset_ == 0 && !is_strict(header)) return Stop::kOther;
    std::uint64_t start = offset_;
    auto length = size_of(header);
    if (length && header[156] == 'x') {
      if (offset_ == 0 || *length == 0 || *length > kBlock) return Stop::kOther;
      const std::uint8_t* records = block(start + kBlock);
      start += 2 * kBlock;
      header = block(start);
      if (!header) return Stop::kMore;
      if (!is_harmless(text(records, *length))) return Stop::kOther;
      length = size_of(header);
    }
    if (!length || header[156] != '0' || header[345]) return Stop::kOther;
    start += kBlock;
    if (start > nbytes_ || *length > nbytes_ - start) return Stop::kOther;
    std::string_view name = text(header, 100);
    name = name.substr(0, name.find('\0'));
    if (!take(name, start, *length)) {
      found_ = {std::string(name), start, *length};
      return Stop::kName;
    }
    last_ = offset_;
    offset_ = start + (*length + kBlock - 1) / kBlock * kBlock;
  }
}

bool TarSamples::take(std::string_view name, std::uint64_t offset, std::uint64_t nbytes) {
  if (!std::all_of(name.begin(), name.end(), [](char c) { return c >= ' ' && c <= '~'; }))
    return false;
  const std::size_t dot = dot_of(name);
  if (dot == name.npos || is_meta(name)) return true;
  lower_.assign(name.substr(dot + 1));
  for (char& c : lower_) c = static_cast<char>(c >= 'A' && c <= 'Z' ? c + ('a' - 'A') : c);
  return add(name.substr(0, dot), lower_, offset, nbytes);
}

bool TarSamples::add(std::string_view key, std::string_view extension, std::uint64_t offset,
                     std::uint64_t nbytes) {
  if (extension == "__key__" || extension == "__url__") return false;  // webdataset's own
  const auto [found, is_new] =
      numbers_.try_emplace(std::string(extension), static_cast<std::int32_t>(extensions_.size()));
  if (is_new) {
    extensions_.emplace_back(extension);
    seen_.push_back(0);
  }
  const bool again = !key_nbytes_.empty() && std::string_view(keys_).ends_with(key) &&
                     key.size() == static_cast<std::size_t>(key_nbytes_.back());
  if (!again) {
    keys_ += key;
    key_nbytes_.push_back(static_cast<std::int32_t>(key.size()));
    n_members_.push_back(0);
  } else if (seen_[found->second] == n_members_.size()) {
    return false;
  }
  seen_[found->second] = n_members_.size();
  ++n_members_.back();
  extension_.push_back(found->second);
  offsets_.push_back(static_cast<std::int64_t>(offset));
  sizes_.push_back(static_cast<std::int64_t>(nbytes));
  return true;
}

}  // namespace pgasdl
