// Says how csrc/cuda/split.h shares out tensors: for each line "interleaved value_size batch channels inner pass
// grouped" of its input (pass 0: a reduction, 1: element-wise; grouped: whether the op has a kernel for groups of
// channels), a line "kernel width blocks threads parts slots_of_thread groups_of_threads".
#include <cstdint>
#include <iostream>

#include "cuda/split.h"

using namespace bagua_syncbn;
using namespace bagua_syncbn::cuda;

int main() {
  bool interleaved;
  int64_t size, batch, channels, inner;
  int pass;
  bool grouped;
  while (std::cin >> interleaved >> size >> batch >> channels >> inner >> pass >> grouped) {
    const Geometry g{interleaved, batch, channels, inner};
    const int64_t width = takes_vectors(g, size, {nullptr}) ? kVectorBytes / size : 1;
    const auto say = [&](const char* kernel, const auto& plan, int64_t slots_of_thread, int64_t groups) {
      const Grid grid = plan.grid();
      std::cout << kernel << ' ' << width << ' ' << grid.x * grid.y * grid.z << ' ' << plan.columns * plan.rows << ' '
                << plan.parts() << ' ' << slots_of_thread << ' ' << groups << '\n';
    };
    if (interleaved) {
      const Interleaved plan = split_interleaved(g, width, size, static_cast<Pass>(pass));
      say("interleaved", plan, ceil_div(ceil_div(plan.height, plan.row_parts), plan.rows),
          std::max<int64_t>(1, plan.rows / width));
    } else if (grouped && width > 1 && takes_groups(g, width)) {
      const Grouped plan = split_grouped(g, width);
      say("grouped", plan, ceil_div(plan.height, plan.rows), 1);
    } else {
      const Planar plan = split_planar(g, width, 0, static_cast<Pass>(pass));
      const int64_t slots = ceil_div(ceil_div(plan.slots, plan.along_inner), plan.columns);
      say("planar", plan, slots * ceil_div(ceil_div(plan.batch, plan.along_batch), plan.rows),
          plan.columns * plan.rows);
    }
  }
}
