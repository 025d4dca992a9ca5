/* Call a program of ExecuTorch, whose operators XNNPACK runs, with marks for arm_count.c around each call.
 *
 *   arm_xnnpack PROGRAM.pte CALLS OUTPUT DTYPE:SHAPE=FILE..
 *
 * DTYPE is f (float32) or l (int64); FILE holds raw data, as l:1x128=ids.bin. OUTPUT gets the data of the first output.
 */
#include <executorch/extension/module/module.h>
#include <executorch/extension/tensor/tensor_ptr.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

// ExecuTorch's wheel has the library but not this header.
namespace executorch::extension::threadpool {
class ThreadPool {
 public:
  bool _unsafe_reset_threadpool(uint32_t threads);
};
ThreadPool* get_threadpool();
}  // namespace executorch::extension::threadpool

namespace et = executorch;

static void mark() { __asm__ volatile("hint #120" ::: "memory"); }

static et::extension::TensorPtr read(const char* text) {
  bool wide = text[0] == 'l';
  std::vector<et::aten::SizesType> shape;
  char* at = const_cast<char*>(text) + 2;
  size_t size = wide ? 8 : 4;
  while (*at && *at != '=') {
    shape.push_back(static_cast<et::aten::SizesType>(strtol(at, &at, 10)));
    size *= static_cast<size_t>(shape.back());
    at += *at == 'x';
  }
  void* data = aligned_alloc(64, (size + 127) / 64 * 64);
  FILE* file = *at ? fopen(at + 1, "rb") : nullptr;
  if (!file || fread(data, 1, size, file) != size) fprintf(stderr, "%s: no such data\n", text), exit(2);
  fclose(file);
  return et::extension::make_tensor_ptr(shape, data, wide ? et::aten::ScalarType::Long : et::aten::ScalarType::Float);
}

int main(int argc, char** argv) {
  if (argc < 5) return fprintf(stderr, "usage: arm_xnnpack PROGRAM.pte CALLS OUTPUT DTYPE:SHAPE=FILE..\n"), 2;
  et::extension::threadpool::get_threadpool()->_unsafe_reset_threadpool(1);
  et::extension::Module module(argv[1]);
  std::vector<et::extension::TensorPtr> tensors;
  for (int i = 4; i < argc; ++i) tensors.push_back(read(argv[i]));
  std::vector<et::runtime::EValue> inputs(tensors.begin(), tensors.end());
  for (int left = atoi(argv[2]); left > 0; --left) {
    mark();
    auto outputs = module.forward(inputs);
    mark();
    if (!outputs.ok()) return fprintf(stderr, "ExecuTorch's error %d\n", static_cast<int>(outputs.error())), 1;
    if (left > 1) continue;
    auto tensor = outputs->at(0).toTensor();
    FILE* file = fopen(argv[3], "wb");
    if (!file || fwrite(tensor.const_data_ptr(), 1, tensor.nbytes(), file) != tensor.nbytes() || fclose(file)) return perror(argv[3]), 5;
  }
  return 0;
}
