"""Columns of the tables that the host fills and the kernels read.

Shapes: N matrices (an expert weight is several), R rank, S the smaller side, C channels. Of a weight that is spread
over ranks, sides and lengths are those of this rank's part unless said otherwise.
"""

import triton.language as tl

# One row of int64 per matrix: what stays the same from step to step.
EXP_AVG = tl.constexpr(0)  # address
EXP_AVG_SQ = tl.constexpr(1)  # address
LAST_NORM = tl.constexpr(2)  # address, or 0 where there is none
STEP = tl.constexpr(3)  # address of the step count, or 0 where the host keeps it
SEED = tl.constexpr(4)
EXPERT = tl.constexpr(5)  # of the whole weight
ROWS = tl.constexpr(6)  # of the matrix as it is stored
COLUMNS = tl.constexpr(7)
RANK = tl.constexpr(8)
HYPER = tl.constexpr(9)  # row of the hyper-parameter table
BASIS = tl.constexpr(10)  # first element of its basis in the scratch
PARTS = tl.constexpr(11)  # first element of its partial sums in the scratch
PART_COUNT = tl.constexpr(12)  # partial sums per channel
GAINS = tl.constexpr(13)  # first element of its gains per channel
BLOCKS = tl.constexpr(14)  # first of its rows in the table of block sums
BLOCK_COUNT = tl.constexpr(15)
WEIGHT_BLOCKS = tl.constexpr(16)  # the same over all experts of its weight, which are refused together
WEIGHT_BLOCK_COUNT = tl.constexpr(17)
SCALE = tl.constexpr(18)  # float32 bits
BASIS_SCALE = tl.constexpr(19)  # float32 bits: what the basis in the scratch is multiplied by
PADDED_GRAD = tl.constexpr(20)  # first element of the copy of its gradient with whole vectors to a row
CODE_SCALE = tl.constexpr(21)  # address, or 0 where the weight is not int8
EXP_AVG_SCALE = tl.constexpr(22)  # address, or 0 where moments are not in 8 bits
EXP_AVG_SQ_SCALE = tl.constexpr(23)
SIDE = tl.constexpr(24)  # S
CHANNELS = tl.constexpr(25)  # C
FIRST_SIDE = tl.constexpr(26)  # where its side begins in the whole matrix
ALL_CHANNELS = tl.constexpr(27)  # of the whole matrix
KEPT = tl.constexpr(28)  # channels whose moments this rank keeps
FIRST_KEPT = tl.constexpr(29)  # where they begin in the whole matrix
FIRST_MOMENT_ROW = tl.constexpr(30)  # where the rows of its moments do, which are sides where the basis is the identity
FIRST = tl.constexpr(31)  # position of its first element in the whole weight, flattened
PITCH = tl.constexpr(32)  # from one of its rows to the next in the whole weight
CHUNK = tl.constexpr(33)  # channels that a rank keeps of those that ranks share out, the last one fewer
SHARES = tl.constexpr(34)  # first element of its low-rank gradient in what ranks exchange
KEPT_GAINS = tl.constexpr(35)  # the same of its gains
MOMENT_PITCH = tl.constexpr(36)  # from one row of its moments to the next
STORED_BASIS = tl.constexpr(37)  # address of the basis that state keeps, or 0 where one is made from the seed
COLUMN_MEANS = tl.constexpr(38)  # address of the second moments of columns, where EXP_AVG_SQ are those of rows
ALL_ROWS = tl.constexpr(39)  # of the whole matrix, where second moments are factored
MATRIX_WIDTH = tl.constexpr(40)

# By how much a stored basis is larger in the scratch: what float16 leaves out of its small entries must not vanish.
STORED_SCALE = tl.constexpr(2.0**10)

# One row of int64 per matrix: what a training loop may move between steps.
WEIGHT = tl.constexpr(0)  # address
GRAD = tl.constexpr(1)  # address
ADDRESS_WIDTH = tl.constexpr(2)

# One row of float32 per group and step count.
LR = tl.constexpr(0)
KEEP = tl.constexpr(1)  # 1 - lr * weight_decay
ONE_MINUS_BETA1 = tl.constexpr(2)
BETA2 = tl.constexpr(3)
ONE_MINUS_BETA2 = tl.constexpr(4)
EPS = tl.constexpr(5)
CORRECTION1 = tl.constexpr(6)  # 1 - beta1 ** step
CORRECTION2_ROOT = tl.constexpr(7)  # sqrt(1 - beta2 ** step)
LIMIT = tl.constexpr(8)
FIRST_SIZE = tl.constexpr(9)  # of Adam's step on a first gradient, at most 1
SIGN = tl.constexpr(10)  # -1 to maximize
STEP_BITS = tl.constexpr(11)  # int32 bits
REFRESH_BITS = tl.constexpr(12)  # int32 bits
HYPER_WIDTH = tl.constexpr(16)

# One row of float32 per matrix: what a step decides about it.
FACTOR = tl.constexpr(0)  # of the gradient: lr * scale * shrink, and the gain where one serves the whole tensor
FINITE = tl.constexpr(1)
KEY0 = tl.constexpr(2)  # int32 bits of the rounding key
KEY1 = tl.constexpr(3)
MEAN_GAIN = tl.constexpr(4)
SHRINK = tl.constexpr(5)
SCALE_KEY0 = tl.constexpr(6)  # the same for the scales of an int8 weight
SCALE_KEY1 = tl.constexpr(7)
OUTCOME_WIDTH = tl.constexpr(8)

# Partial sums per channel, each a plane of the scratch; LOW is the projected gradient itself at rank 1.
LOW = tl.constexpr(0)
GRAD_SQ = tl.constexpr(1)
STEP_SQ = tl.constexpr(2)
MOMENT_SQ = tl.constexpr(3)

# Sums over a block of channels, one row of float32 each.
B_LOW_SQ = tl.constexpr(0)
B_STEP_SQ = tl.constexpr(1)
B_MOMENT_SQ = tl.constexpr(2)
B_GRAD_SQ = tl.constexpr(3)
B_SCALED_SQ = tl.constexpr(4)
B_GAIN = tl.constexpr(5)
B_BAD = tl.constexpr(6)
B_LARGEST = tl.constexpr(7)
BLOCK_WIDTH = tl.constexpr(8)
