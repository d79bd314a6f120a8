// Runs a model that export.py has packaged, without Python:
//
//   run MODEL INPUTS OUTPUTS
//
// INPUTS is a file of `torch.save` with the list of tensors that the model takes, OUTPUTS becomes
// one with a tuple of those that it returns.
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <cstdio>
#include <exception>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

std::vector<at::Tensor> load(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("cannot read " + path);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  std::vector<at::Tensor> tensors;
  const c10::IValue list = torch::jit::pickle_load(bytes);
  for (const c10::IValue& each : list.toListRef()) tensors.push_back(each.toTensor());
  return tensors;
}

void save(const std::string& path, const std::vector<at::Tensor>& tensors) {
  const std::vector<c10::IValue> values(tensors.begin(), tensors.end());
  const std::vector<char> bytes = torch::jit::pickle_save(c10::ivalue::Tuple::create(values));
  std::ofstream file(path, std::ios::binary);
  if (!file.write(bytes.data(), bytes.size())) throw std::runtime_error("cannot write " + path);
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 4) {
    std::fprintf(stderr, "usage: %s MODEL INPUTS OUTPUTS\n", arguments[0]);
    return 2;
  }
  try {
    torch::inductor::AOTIModelPackageLoader model(arguments[1]);
    save(arguments[3], model.run(load(arguments[2])));
  } catch (const c10::Error& error) {
    std::fprintf(stderr, "%s\n", error.what_without_backtrace());
    return 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
