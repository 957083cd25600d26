// Runs a target over files and folders of inputs, where there is no libFuzzer.
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <vector>

#include "fuzz.hpp"

int main(int count, char** names) {
  namespace files = std::filesystem;
  std::vector<files::path> inputs;
  for (int i = 1; i < count; ++i) {
    if (!files::is_directory(names[i])) {
      inputs.emplace_back(names[i]);
      continue;
    }
    for (const auto& entry : files::directory_iterator(names[i])) inputs.push_back(entry.path());
  }
  for (const files::path& path : inputs) {
    std::fprintf(stderr, "%s\n", path.c_str());
    std::ifstream file(path, std::ios::binary);
    const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
    LLVMFuzzerTestOneInput(reinterpret_cast<const std::uint8_t*>(bytes.data()), bytes.size());
  }
  std::printf("%zu inputs\n", inputs.size());
  return inputs.empty() ? 1 : 0;
}
