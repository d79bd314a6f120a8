// Which cells of a dense mask hide all their pairs, and which show all: kernels skip tiles of the former and need no
// mask arithmetic in tiles of the latter.
#include "cuda/launch.h"
#include "cuda/shared_tile.h"

namespace hk::cuda {

// A warp reads one cell. `mask` is read by its strides; along rows or keys where it broadcasts, it has one cell.
struct CellsOfMask {
  using Params = DenseCellsParams;
  static constexpr int kThreads = 256, kCells = kThreads / kWarp;

  static constexpr int64_t count(const Params& p) {
    return p.cells.size[0] * p.cells.size[1] * p.cells.size[2] * p.cells.size[3];
  }

  HK_DEVICE static void run(const Params& p) {
    const int64_t index = block_index() * kCells + warp();
    if (index >= count(p)) return;
    const int64_t *const cells = p.cells.size, *const size = p.mask.size;
    const int64_t first_key = index % cells[3] * kCell, rest = index / cells[3];
    const int64_t first_row = rest % cells[2] * kCell, head = rest / cells[2];
    const int64_t* const stride = p.mask.stride;
    const auto* const mask =
        static_cast<const uint8_t*>(p.mask.data) + head / cells[1] * stride[0] + head % cells[1] * stride[1];
    const int64_t key = first_key + lane();
    bool any = false, all = true;
    if (key < size[3]) {
      HK_UNROLL_BY(4)
      for (int64_t row = first_row; row < first_row + kCell && row < size[2]; ++row) {
        const bool shown = mask[row * stride[2] + key * stride[3]] != 0;
        any |= shown;
        all &= shown;
      }
    }
    any = any_in_warp(any);
    all = !any_in_warp(!all);
    if (lane() == 0) static_cast<uint8_t*>(p.cells.data)[index] = all ? kShown : any ? kMixed : kHidden;
  }
};

void dense_cells(const DenseCellsParams& p, const LaunchTarget& target) {
  static_assert(kCell == kWarp, "a lane has a column of a cell");
  const int64_t blocks = ceil_div(CellsOfMask::count(p), CellsOfMask::kCells);
  launch<CellsOfMask>(blocks, 0, p, target);
}

}  // namespace hk::cuda
