// To experts and back: choices and weights of tokens, rows sorted by expert, losses of the router, experts without matrices.
//
// A block has a token at a time, or an expert. What is sorted or counted takes its places in the order of tokens, whatever the
// order of threads.

#define NOWHERE 0xffffffffu

struct RouterOf {
    u64 groups, groups_chosen;
    u32 sigmoid, normalise;
    float scale;
    u32 by_two;
};

// ---- a token's scores ----

// Scores of a token's logits, in shared memory.
__device__ inline void scores_of(const float* logits, u64 experts, u32 sigmoid, float* scores, float* scratch) {
    if (sigmoid) {
        EACH_OF_BLOCK(e, experts) scores[e] = 1.0f / (1.0f + expf(-logits[e]));
        __syncthreads();
        return;
    }
    float most = -INFINITE, sum = 0.0f;
    EACH_OF_BLOCK(e, experts) most = logits[e] > most ? logits[e] : most;
    most = block_largest(most, scratch);
    EACH_OF_BLOCK(e, experts) {
        scores[e] = expf(logits[e] - most);
        sum += scores[e];
    }
    sum = block_sum(sum, scratch);
    EACH_OF_BLOCK(e, experts) scores[e] /= sum;
    __syncthreads();
}

// In the order of numbers: larger ones first, what is not a number last, of equal ones the first. Never 0.
__device__ inline u64 rank_of(float x, u64 place) {
    u32 bits = __float_as_uint(x + 0.0f);
    u32 order = x != x ? 0 : bits >> 31 ? ~bits : bits | 0x80000000u;
    return (u64)order << 32 | (u32)~place;
}
__device__ inline u64 place_of(u64 rank) { return (u32)~rank; }

// The best of a group, or the best two together.
__device__ inline float best_of_group(const float* scores, u64 size, u32 by_two) {
    u64 first = 0, second = 0;
    for (u64 e = 0; e < size; e++) {
        u64 rank = rank_of(scores[e], e);
        if (rank > first) {
            second = first;
            first = rank;
        } else if (rank > second) {
            second = rank;
        }
    }
    float sum = scores[place_of(first)];
    return by_two && second ? sum + scores[place_of(second)] : sum;
}

// The largest of all ranks is taken out, and is the answer.
__device__ inline u64 take_best(u64* ranks, u64 count, u64* scratch) {
    u64 best = 0;
    EACH_OF_BLOCK(i, count) best = ranks[i] > best ? ranks[i] : best;
    best = block_fold(best, scratch, Larger());
    u64 place = place_of(best);
    if (threadIdx.x == 0 && place < count) ranks[place] = 0;
    __syncthreads();
    return place;
}

KERNEL(route, const float* flag, const float* logits, View correction, RouterOf router, u32* choice, u64 tokens, u64 experts,
       u64 each) {
    SHARED(u64, scratch);
    if (skipped(flag)) return;
    u64 *ranks = scratch + THREADS, *of_groups = ranks + experts;
    float* scores = (float*)(of_groups + (router.groups ? router.groups : 0));
    bool plain = !correction.at && !router.groups;
    EACH_ROW(token, tokens) {
        const float* own = logits + token * experts;
        // The order of a softmax is that of its logits.
        if (plain) {
            EACH_OF_BLOCK(e, experts) scores[e] = own[e];
            __syncthreads();
        } else {
            scores_of(own, experts, router.sigmoid, scores, (float*)scratch);
        }
        if (correction.at) EACH_OF_BLOCK(e, experts) scores[e] += load(correction, e);
        __syncthreads();
        if (router.groups) {
            u64 size = experts / router.groups;
            EACH_OF_BLOCK(g, router.groups) of_groups[g] = 
                    rank_of(best_of_group(scores + g * size, size, router.by_two), g);
            __syncthreads();
            for (u64 taken = 0; taken < router.groups_chosen; taken++) take_best(of_groups, router.groups, scratch);
            // What is left there was not chosen.
            EACH_OF_BLOCK(e, experts) scores[e] = of_groups[e / size] ? -INFINITE : scores[e];
            __syncthreads();
        }
        EACH_OF_BLOCK(e, experts) ranks[e] = rank_of(scores[e], e);
        __syncthreads();
        for (u64 j = 0; j < each; j++) {
            u64 best = take_best(ranks, experts, scratch);
            if (threadIdx.x == 0) choice[token * each + j] = (u32)best;
        }
        __syncthreads();
    }
}

// The expert of a token's place; of all experts without a choice. `experts` where there is none.
__device__ inline u64 expert_of(const u32* choice, u64 token, u64 each, u64 j, u64 experts) {
    u64 expert = choice ? choice[token * each + j] : j;
    return expert < experts ? expert : experts;
}

__device__ inline float sum_of_chosen(const float* scores, const u32* choice, u64 token, u64 each, u64 experts, const RouterOf& router) {
    if (!router.normalise) return 1.0f;
    float sum = 0.0f;
    for (u64 j = 0; j < each; j++) {
        u64 expert = expert_of(choice, token, each, j, experts);
        if (expert < experts) sum += scores[expert];
    }
    return router.sigmoid ? sum + 1e-20f : sum;
}

KERNEL(weigh, const float* flag, const float* logits, const u32* choice, RouterOf router, float* weights, u64 tokens, u64 experts,
       u64 each) {
    SHARED(float, scratch);
    if (skipped(flag)) return;
    float* scores = scratch + THREADS;
    EACH_ROW(token, tokens) {
        scores_of(logits + token * experts, experts, router.sigmoid, scores, scratch);
        float factor = router.scale / sum_of_chosen(scores, choice, token, each, experts, router);
        EACH_OF_BLOCK(j, each) {
            u64 expert = expert_of(choice, token, each, j, experts);
            weights[token * each + j] = expert < experts ? scores[expert] * factor : 0.0f;
        }
        __syncthreads();
    }
}

KERNEL(weigh_backward, const float* flag, const float* logits, const u32* choice, RouterOf router, const float* dweights,
       float* dlogits, u64 tokens, u64 experts, u64 each) {
    SHARED(float, scratch);
    if (skipped(flag)) return;
    float *scores = scratch + THREADS, *d = scores + experts;
    EACH_ROW(token, tokens) {
        scores_of(logits + token * experts, experts, router.sigmoid, scores, scratch);
        const float* own = dweights + token * each;
        float sum = sum_of_chosen(scores, choice, token, each, experts, router), factor = router.scale / sum, through = 0.0f;
        if (router.normalise) {
            for (u64 j = 0; j < each; j++) {
                u64 expert = expert_of(choice, token, each, j, experts);
                if (expert < experts) through += own[j] * scores[expert];
            }
            through *= factor / sum;
        }
        EACH_OF_BLOCK(e, experts) d[e] = 0.0f;
        __syncthreads();
        EACH_OF_BLOCK(j, each) {
            u64 expert = expert_of(choice, token, each, j, experts);
            if (expert < experts) d[expert] = own[j] * factor - through;
        }
        __syncthreads();
        float mean = 0.0f;
        for (u64 j = 0; !router.sigmoid && j < each; j++) {
            u64 expert = expert_of(choice, token, each, j, experts);
            if (expert < experts) mean += d[expert] * scores[expert];
        }
        EACH_OF_BLOCK(e, experts) {
            float slope = router.sigmoid ? d[e] * (scores[e] * (1.0f - scores[e])) : scores[e] * (d[e] - mean);
            dlogits[token * experts + e] = slope;
        }
        __syncthreads();
    }
}

// ---- places by expert ----

// How many threads before this one have something.
__device__ inline u32 block_before(u32 x, u32* scratch, u32* all) {
    scratch[threadIdx.x] = x;
    __syncthreads();
    u32 before = 0, sum = 0;
    for (u32 i = 0; i < THREADS; i++) {
        if (i == threadIdx.x) before = sum;
        sum += scratch[i];
    }
    __syncthreads();
    *all = sum;
    return before;
}

// The number of a place's expert from `first` on; `experts` of any other, and one more of nobody.
__device__ inline u64 number_of(u32 expert, u32 first, u64 experts) {
    if (expert == NOWHERE) return experts + 1;
    u64 number = (u32)(expert - first);
    return number < experts ? number : experts;
}

// counts[e] = how many places are of number e, or what is there already and as many, up to the largest number.
KERNEL(count_experts, const float* flag, const u32* choice, u64 places, u32 first, u64 experts, u32* counts, u32 add) {
    SHARED(u64, scratch);
    if (skipped(flag)) return;
    u64 number = blockIdx.x, sum = 0;
    EACH_OF_BLOCK(p, places) sum += number_of(choice[p], first, experts) == number;
    sum = block_sum(sum, scratch);
    if (threadIdx.x != 0) return;
    if (add) sum += counts[number];
    counts[number] = sum < NOWHERE ? (u32)sum : NOWHERE;
}

KERNEL(start_experts, const float* flag, const u32* counts, u64 experts, u32* starts, u32* offsets) {
    if (skipped(flag)) return;
    if (threadIdx.x != 0) return;
    u32 sum = 0;
    for (u64 e = 0; e <= experts; e++) {
        starts[e] = offsets[e] = sum;
        sum += counts[e];
    }
}

KERNEL(place_experts, const float* flag, const u32* choice, u64 places, u32 first, u64 experts, const u32* starts, u32* sources,
       u64 rows, u32* of_places) {
    SHARED(u32, scratch);
    if (skipped(flag)) return;
    u64 number = blockIdx.x, row = starts[number];
    for (u64 from = 0; from < places; from += THREADS) {
        u64 p = from + threadIdx.x;
        u32 own = p < places && number_of(choice[p], first, experts) == number, all;
        u64 at = row + block_before(own, scratch, &all);
        if (own && at < rows) {
            sources[at] = (u32)p;
            of_places[p] = (u32)at;
        }
        row += all;
    }
}

// A row of experts' rows in blocks of `size` slots, a block for every `each` experts.
KERNEL(rows_to_blocks, const float* flag, const u32* sources, const u32* offsets, u64 experts, u64 each, u64 size, u32* slots,
       u32* taken, u64 rows, u64 places) {
    if (skipped(flag)) return;
    EACH(r, rows) {
        u64 block = 0, blocks = experts / each;
        while (block < blocks && offsets[(block + 1) * each] <= r) block++;
        if (block == blocks || sources[r] >= places) continue;
        u64 slot = r - offsets[block * each];
        if (slot >= size) continue;
        slots[block * size + slot] = sources[r];
        taken[sources[r]] = (u32)(block * size + slot);
    }
}

// A block of threads for each block of slots: the rows whose places are its own, in order.
KERNEL(rows_from_blocks, const float* flag, const u32* sources, const u32* offsets, u64 experts, u64 each, u64 size, u32* rows,
       u32* slots, u64 count) {
    SHARED(u32, scratch);
    if (skipped(flag)) return;
    u64 block = blockIdx.x, next = 0, last = offsets[experts] < count ? offsets[experts] : count;
    for (u64 from = 0; from < last; from += THREADS) {
        u64 r = from + threadIdx.x;
        u32 own = r < last && sources[r] / each == block, all;
        u64 slot = next + block_before(own, scratch, &all);
        if (own && slot < size) {
            rows[block * size + slot] = (u32)r;
            slots[r] = (u32)(block * size + slot);
        }
        next += all;
    }
}

KERNEL(fill_words, const float* flag, u32* out, u64 n, u32 value) {
    if (skipped(flag)) return;
    EACH(i, n) out[i] = value;
}

// A block for each expert: its first places, in the order of tokens.
KERNEL(limit_experts, const float* flag, const u32* choice, u64 places, u64 each, u64 first, u64 others, u32* taken, u32* dropped) {
    SHARED(u32, scratch);
    if (skipped(flag)) return;
    u64 expert = blockIdx.x, most = expert < first ? each : others, before = 0;
    for (u64 from = 0; from < places; from += THREADS) {
        u64 p = from + threadIdx.x;
        u32 own = p < places && choice[p] == expert, all;
        u64 number = before + block_before(own, scratch, &all);
        if (own) taken[p] = number < most ? (u32)expert : NOWHERE;
        before += all;
    }
    if (threadIdx.x == 0 && dropped && before > most) atomicAdd(dropped, (u32)(before - most));
}

KERNEL(add_counts, const float* flag, const u32* counts, u32* out, u64 n) {
    if (skipped(flag)) return;
    EACH(i, n) {
        u64 sum = (u64)out[i] + counts[i];
        out[i] = sum < NOWHERE ? (u32)sum : NOWHERE;
    }
}

KERNEL(adjust_correction, const float* flag, const u32* counts, u64 experts, float speed, float* correction) {
    SHARED(u64, scratch);
    if (skipped(flag)) return;
    u64 total = 0;
    EACH_OF_BLOCK(e, experts) total += counts[e];
    total = block_sum(total, scratch);
    EACH_OF_BLOCK(e, experts) {
        u64 own = counts[e] * experts;
        if (own < total) correction[e] += speed;
        if (own > total) correction[e] -= speed;
    }
}

// ---- rows to experts and back ----

KERNEL(gather_rows, const float* flag, View x, const u32* sources, u64 places, u64 each, View out, u64 rows, u64 columns) {
    if (skipped(flag)) return;
    EACH(i, rows * columns) {
        u64 source = sources[i / columns];
        store(out, i, source < places ? load(x, source / each * columns + i % columns) : 0.0f);
    }
}

KERNEL(combine_rows, const float* flag, View x, u64 rows, const u32* places, u64 each, View out, u64 tokens, u64 columns,
       u32 accumulate) {
    if (skipped(flag)) return;
    EACH(i, tokens * columns) {
        u64 token = i / columns;
        float sum = accumulate ? load(out, i) : 0.0f;
        for (u64 j = 0; j < each; j++) {
            u64 row = places[token * each + j];
            if (row < rows) sum += load(x, row * columns + i % columns);
        }
        store(out, i, sum);
    }
}

KERNEL(scale_rows, const float* flag, View x, const float* factors, u64 places, const u32* sources, View out, u64 rows,
       u64 columns) {
    if (skipped(flag)) return;
    EACH(i, rows * columns) {
        u64 row = i / columns, source = sources ? sources[row] : row;
        store(out, i, source < places ? load(x, i) * factors[source] : 0.0f);
    }
}

KERNEL(row_dots, const float* flag, View a, View b, const u32* places, float* out, u64 count, u64 rows, u64 columns) {
    SHARED(float, scratch);
    if (skipped(flag)) return;
    EACH_ROW(p, count) {
        u64 row = places ? places[p] : p;
        float sum = 0.0f;
        if (row < rows) EACH_OF_BLOCK(i, columns) sum += load(a, row * columns + i) * load(b, row * columns + i);
        sum = block_sum(sum, scratch);
        if (threadIdx.x == 0) out[p] = sum;
    }
}

KERNEL(jitter, const float* flag, View x, View out, u64 n, float noise, u64 seed, u64 first, u32 accumulate) {
    if (skipped(flag)) return;
    EACH(i, n) {
        float share = ((float)(random_word(seed, first + i) >> 8) + 0.5f) * (2.0f / 16777216.0f) - 1.0f;
        float value = load(x, i) * (1.0f + noise * share);
        store(out, i, accumulate ? load(out, i) + value : value);
    }
}

// ---- losses of the router ----

// The largest logit of a token and the sum of the exponentials of what is below it.
__device__ inline void parts_of_softmax(const float* logits, u64 experts, float* scratch, float* most, float* sum) {
    float largest = -INFINITE, all = 0.0f;
    EACH_OF_BLOCK(e, experts) largest = logits[e] > largest ? logits[e] : largest;
    *most = block_largest(largest, scratch);
    EACH_OF_BLOCK(e, experts) all += expf(logits[e] - *most);
    *sum = block_sum(all, scratch);
}

KERNEL(softmax_parts, const float* flag, const float* logits, u64 tokens, u64 experts, float* parts) {
    SHARED(float, scratch);
    if (skipped(flag)) return;
    EACH_ROW(token, tokens) {
        float most, sum;
        parts_of_softmax(logits + token * experts, experts, scratch, &most, &sum);
        if (threadIdx.x == 0) {
            parts[2 * token] = most;
            parts[2 * token + 1] = sum;
        }
    }
}

// out[0] += factor times the squared logarithms of all tokens.
KERNEL(z_loss, const float* flag, const float* parts, u64 tokens, double factor, float* out) {
    SHARED(double, scratch);
    if (skipped(flag)) return;
    double sum = 0.0;
    EACH_OF_BLOCK(token, tokens) {
        double logarithm = (double)parts[2 * token] + log((double)parts[2 * token + 1]);
        sum += logarithm * logarithm;
    }
    sum = block_sum(sum, scratch);
    if (threadIdx.x == 0) out[0] += (float)(factor * sum);
}

KERNEL(z_backward, const float* flag, const float* logits, u64 tokens, u64 experts, double factor, float* dlogits) {
    SHARED(float, scratch);
    if (skipped(flag)) return;
    EACH_ROW(token, tokens) {
        const float* own = logits + token * experts;
        float most, sum;
        parts_of_softmax(own, experts, scratch, &most, &sum);
        float by = (float)(2.0 * factor * ((double)most + log((double)sum)));
        EACH_OF_BLOCK(e, experts) dlogits[token * experts + e] += by * (expf(own[e] - most) / sum);
    }
}

KERNEL(router_mass, const float* flag, const float* logits, const float* parts, u64 tokens, u64 experts, double* mass) {
    SHARED(double, scratch);
    if (skipped(flag)) return;
    u64 expert = blockIdx.x;
    double sum = 0.0;
    EACH_OF_BLOCK(token, tokens)
        sum += (double)(expf(logits[token * experts + expert] - parts[2 * token]) / parts[2 * token + 1]);
    sum = block_sum(sum, scratch);
    if (threadIdx.x == 0) mass[expert] += sum;
}

KERNEL(balance_loss, const float* flag, const u32* counts, const double* mass, u64 experts, double rows, u64 first, double others,
       double factor, float* out) {
    SHARED(double, scratch);
    if (skipped(flag)) return;
    double sum = 0.0;
    EACH_OF_BLOCK(e, experts) sum += (e < first ? 1.0 : others) * (double)counts[e] / rows * (mass[e] / rows);
    sum = block_sum(sum, scratch);
    if (threadIdx.x == 0) out[0] = (float)(factor * (double)experts * sum);
}

KERNEL(balance_backward, const float* flag, const float* logits, const u32* counts, u64 tokens, u64 experts, double rows,
       u64 first, double others, double factor, float* dlogits) {
    SHARED(float, scratch);
    if (skipped(flag)) return;
    float* scores = scratch + THREADS;
    float each = (float)(factor * (double)experts / rows);
    EACH_ROW(token, tokens) {
        scores_of(logits + token * experts, experts, 0, scores, scratch);
        float mean = 0.0f;
        EACH_OF_BLOCK(e, experts) mean += scores[e] * (float)((e < first ? 1.0 : others) * (double)counts[e] / rows);
        mean = block_sum(mean, scratch);
        EACH_OF_BLOCK(e, experts) {
            float share = (float)((e < first ? 1.0 : others) * (double)counts[e] / rows);
            dlogits[token * experts + e] += each * scores[e] * (share - mean);
        }
        __syncthreads();
    }
}

// ---- experts without matrices ----

struct ZeroExpertsOf {
    u64 copies, constants, end;
};

// The shares of a constant expert's input and of its vector.
__device__ inline void shares_of(const float* gates, u64 number, float* input, float* vector) {
    float more = gates[2 * number] - gates[2 * number + 1];
    *input = 1.0f / (1.0f + expf(-more));
    *vector = 1.0f / (1.0f + expf(more));
}

KERNEL(zero_factors, const float* flag, const u32* choice, const float* weights, const float* gates, ZeroExpertsOf experts,
       float* inputs, float* vectors, u64 tokens, u64 each) {
    if (skipped(flag)) return;
    u64 constant = experts.end - experts.constants;
    EACH(token, tokens) {
        float input = 0.0f;
        for (u64 c = 0; c < constant; c++) vectors[token * constant + c] = 0.0f;
        for (u64 j = token * each; j < (token + 1) * each; j++) {
            u64 expert = choice[j];
            if (expert < experts.copies || expert >= experts.end) continue;
            if (expert < experts.constants) {
                input += weights[j];
                continue;
            }
            float of_input, of_vector;
            shares_of(gates + token * 2 * constant, expert - experts.constants, &of_input, &of_vector);
            input += weights[j] * of_input;
            vectors[token * constant + expert - experts.constants] += weights[j] * of_vector;
        }
        inputs[token] = input;
    }
}

KERNEL(zero_factors_backward, const float* flag, const u32* choice, const float* weights, const float* gates, ZeroExpertsOf experts,
       const float* dinputs, const float* dvectors, float* dweights, float* dgates, u64 tokens, u64 each) {
    if (skipped(flag)) return;
    u64 constant = experts.end - experts.constants;
    EACH(token, tokens) {
        for (u64 c = 0; c < 2 * constant; c++) dgates[token * 2 * constant + c] = 0.0f;
        for (u64 j = token * each; j < (token + 1) * each; j++) {
            u64 expert = choice[j];
            if (expert < experts.copies || expert >= experts.end) continue;
            if (expert < experts.constants) {
                dweights[j] = dinputs[token];
                continue;
            }
            u64 number = expert - experts.constants, at = (token * constant + number) * 2;
            float of_input, of_vector, dvector = dvectors[token * constant + number];
            shares_of(gates + token * 2 * constant, number, &of_input, &of_vector);
            dweights[j] = of_input * dinputs[token] + of_vector * dvector;
            float through = weights[j] * of_input * of_vector * (dinputs[token] - dvector);
            dgates[at] += through;
            dgates[at + 1] -= through;
        }
    }
}

KERNEL(add_scaled_rows, const float* flag, View x, const float* factors, View out, u64 n, u64 columns) {
    if (skipped(flag)) return;
    EACH(i, n) {
        float factor = factors[i / columns];
        // A token without such an expert keeps what it has, whatever its numbers are.
        if (factor != 0.0f) store(out, i, load(out, i) + load(x, i) * factor);
    }
}
