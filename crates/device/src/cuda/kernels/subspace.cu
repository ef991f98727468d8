// What optimizers that keep their states in a subspace take beside products. Bases are small and rarely found: a block has all.

struct DirectionNumbers {
    float beta1, less1, beta2, less2, epsilon;
    u32 unused;
};

KERNEL(adam_direction, const float* flag, const float* grad, float* m, float* v, float* out, u64 n, DirectionNumbers h) {
    if (skipped(flag)) return;
    EACH(i, n) {
        float g = grad[i];
        m[i] = m[i] * h.beta1 + g * h.less1;
        v[i] = v[i] * h.beta2 + g * g * h.less2;
        out[i] = m[i] / (sqrtf(v[i]) + h.epsilon);
    }
}

// out = the root of one sum over that of another.
KERNEL(norm_ratios, const float* flag, const double* a, const double* b, float* out, u64 n, float epsilon, u32 rounded) {
    if (skipped(flag)) return;
    EACH(i, n) {
        double above = sqrt(a[i]);
        if (rounded) above = (double)(float)above;
        out[i] = (float)(above / (sqrt(b[i]) + (double)epsilon));
    }
}

// Box and Muller 1958.
KERNEL(random_normal, const float* flag, float* out, u64 n, float std, u64 seed) {
    if (skipped(flag)) return;
    EACH(i, n) {
        float share = (float)((random_word(seed, i) >> 8) + 1) / 16777216.0f;
        float turn = (float)(random_word(~seed, i) >> 8) / 16777216.0f - 0.5f;
        out[i] = std * sqrtf(-2.0f * logf(share)) * cospif(2.0f * turn);
    }
}

__device__ inline double row_product(const float* a, const float* b, u64 n, double* scratch) {
    double sum = 0.0;
    EACH_OF_BLOCK(i, n) sum += (double)a[i] * (double)b[i];
    return block_sum(sum, scratch);
}

// Modified Gram-Schmidt, twice. `norms` has room for a number a row.
KERNEL(orthonormalize, const float* flag, float* x, double* norms, u64 rows, u64 columns) {
    SHARED(double, scratch);
    if (skipped(flag)) return;
    for (u32 pass = 0; pass < 2; pass++) {
        for (u64 row = 0; row < rows; row++) {
            double square = row_product(x + row * columns, x + row * columns, columns, scratch);
            if (threadIdx.x == 0) norms[row] = sqrt(square);
        }
        __syncthreads();
        for (u64 row = 0; row < rows; row++) {
            float* own = x + row * columns;
            double norm = sqrt(row_product(own, own, columns, scratch));
            bool dependent = norm <= norms[row] * 1e-6 || (pass == 1 && norm < 0.5);
            float factor = dependent ? 0.0f : (float)(1.0 / norm);
            EACH_OF_BLOCK(i, columns) own[i] *= factor;
            __syncthreads();
            for (u64 other = row + 1; other < rows; other++) {
                float* next = x + other * columns;
                float share = (float)row_product(own, next, columns, scratch);
                EACH_OF_BLOCK(i, columns) next[i] -= share * own[i];
                __syncthreads();
            }
        }
    }
}

// Jacobi's cyclic method: the rows of `vectors` become eigenvectors, those of the largest eigenvalues go to the columns of out.
KERNEL(eigenvectors, const float* flag, float* matrix, float* vectors, float* out, u32* order, u64 n, u64 kept) {
    if (skipped(flag)) return;
    EACH_OF_BLOCK(i, n * n) vectors[i] = i / n == i % n ? 1.0f : 0.0f;
    __syncthreads();
    for (u32 sweep = 0; sweep < 15; sweep++) {
        u32 turns = 0;
        for (u64 p = 0; p < n; p++) {
            for (u64 q = p + 1; q < n; q++) {
                double app = matrix[p * n + p], aqq = matrix[q * n + q], apq = matrix[p * n + q];
                __syncthreads();
                if (apq * apq <= 1e-14 * fabs(app * aqq) || fabs(apq) < 1.17549435e-38) continue;
                turns = 1;
                double theta = (aqq - app) / (2.0 * apq);
                double tangent = (theta < 0.0 ? -1.0 : 1.0) / (fabs(theta) + sqrt(theta * theta + 1.0));
                double cosine = 1.0 / sqrt(tangent * tangent + 1.0);
                float c = (float)cosine, s = (float)(cosine * tangent);
                EACH_OF_BLOCK(i, 2 * n) {
                    float* rows = i < n ? matrix : vectors;
                    float x = rows[p * n + i % n], y = rows[q * n + i % n];
                    rows[p * n + i % n] = c * x - s * y;
                    rows[q * n + i % n] = s * x + c * y;
                }
                __syncthreads();
                EACH_OF_BLOCK(i, n) {
                    float x = matrix[i * n + p], y = matrix[i * n + q];
                    matrix[i * n + p] = c * x - s * y;
                    matrix[i * n + q] = s * x + c * y;
                }
                __syncthreads();
                if (threadIdx.x == 0) matrix[p * n + q] = matrix[q * n + p] = 0.0f;
                __syncthreads();
            }
        }
        // All threads have seen the same numbers.
        if (!turns) break;
    }
    EACH_OF_BLOCK(i, n) {
        float own = matrix[i * n + i];
        u32 above = 0;
        for (u64 j = 0; j < n; j++) {
            float other = matrix[j * n + j];
            above += other > own || (other == own && j < i);
        }
        order[above] = (u32)i;
    }
    __syncthreads();
    EACH_OF_BLOCK(i, n * kept) out[i] = vectors[(u64)order[i % kept] * n + i / kept];
}
