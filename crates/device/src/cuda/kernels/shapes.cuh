// What kernels for all cards and those for tensor cores know alike of products and of attention.

// Rows and columns of c that a block makes.
#define TILE 128
// Numbers of the inner length whose products are summed by themselves.
#define FOLD 1024
// Rows of which a product has a kernel of its own, at most.
#define FEW 16

// A matrix: element (row, column) is number row * row_stride + column * column_stride of a tensor. One of them is 1.
struct Matrix {
    View values;
    u64 row_stride;
    u64 column_stride;
};

// ---- attention ----

struct Shape {
    u64 batch, q_len, kv_len, kv_capacity, heads, kv_heads, head_dim;
    // Elements of a head in the storage of keys and of values: whole blocks.
    u64 k_columns, v_columns;
    // The position of the first key, where the keys are a piece; 0 of whole sequences.
    u64 first;
    // The largest u64 where there is none.
    u64 window;
    // 0 where there is no pattern of blocks.
    u64 block, local_blocks, global_blocks;
    float scale, soft_cap;
    u32 narrow;
    u32 unused;
};

__device__ inline bool sees(const Shape& s, u64 query, u64 key, u64 first) {
    if (key > query) return false;
    if (key < first) return key == query;
    if (query - key >= s.window) return false;
    if (s.block == 0) return true;
    return key / s.block < s.global_blocks || query / s.block - key / s.block < s.local_blocks;
}

// The first position that a query may see.
__device__ inline u64 earliest(const Shape& s, u64 query, u64 first) {
    u64 near = query + 1 > s.window ? query + 1 - s.window : 0;
    u64 low = near > first ? near : first;
    return low < query ? low : query;
}

// Where the head of a key begins among the elements of keys or values.
__device__ inline u64 key_place(const Shape& s, u64 batch, u64 key, u64 kv_head, u64 columns) {
    u64 row = batch * s.kv_capacity + (key - s.first) % s.kv_capacity;
    return (row * s.kv_heads + kv_head) * columns;
}

__device__ inline float narrowed(const Shape& s, float x) { return s.narrow ? bf16_value(to_bf16(x)) : x; }

// The score of a key whose product with a query is given.
__device__ inline float score_of(const Shape& s, float product) {
    float x = product * s.scale;
    return s.soft_cap > 0.0f ? s.soft_cap * tanhf(x / s.soft_cap) : x;
}
