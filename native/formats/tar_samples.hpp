// The samples of a tar by webdataset's convention, out of the headers of its members.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace pgasdl {

// Members in a row whose names differ in extension are a sample. Only plain members are understood
// here: files with short names, of printable ASCII, whose sizes are octal digits, perhaps behind a
// pax header that has only times and owners. Whoever walks looks at all others and adds them.
class TarSamples {
 public:
  enum class Stop {
    kMore,   // the headers at offset() do not lie in the data
    kOther,  // no plain member begins at offset()
    kName,   // found() is a plain member there, of another name, or one that must not be there
    kEnd,    // a block of zeros is there
  };

  explicit TarSamples(std::uint64_t nbytes) : nbytes_(nbytes) {}

  // Takes members from offset() on, out of `size` bytes that begin at byte `begin` of the tar.
  Stop walk(const std::uint8_t* data, std::size_t size, std::uint64_t begin);

  // Adds a field. False, and nothing: its sample has one of that name.
  bool add(std::string_view key, std::string_view extension, std::uint64_t offset,
           std::uint64_t nbytes);

  std::uint64_t offset() const { return offset_; }
  struct Member {
    std::string name;
    std::uint64_t begin, nbytes;
  };
  const Member& found() const { return found_; }
  // Goes on behind a member that somebody else has looked at.
  void go_on(std::uint64_t offset) { offset_ = offset; }
  // Where the last member began that was taken here.
  std::uint64_t last() const { return last_; }

  // Of samples.
  const std::string& keys() const { return keys_; }
  const std::vector<std::int32_t>& key_nbytes() const { return key_nbytes_; }
  const std::vector<std::int32_t>& n_members() const { return n_members_; }
  // Of fields: which of the extensions, where the data begin, and how many bytes they are.
  const std::vector<std::int32_t>& extension() const { return extension_; }
  const std::vector<std::int64_t>& offsets() const { return offsets_; }
  const std::vector<std::int64_t>& sizes() const { return sizes_; }
  const std::vector<std::string>& extensions() const { return extensions_; }

 private:
  bool take(std::string_view name, std::uint64_t offset, std::uint64_t nbytes);

  const std::uint64_t nbytes_;
  std::uint64_t offset_ = 0, last_ = 0;
  Member found_{};
  std::string keys_, lower_;
  std::vector<std::int32_t> key_nbytes_, n_members_, extension_;
  std::vector<std::int64_t> offsets_, sizes_;
  std::vector<std::string> extensions_;
  std::vector<std::size_t> seen_;  // the last sample, counted from 1, that has each extension
  std::unordered_map<std::string, std::int32_t> numbers_;
};

}  // namespace pgasdl
