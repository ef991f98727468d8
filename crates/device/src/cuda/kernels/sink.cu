// Sinks of attention: what attention gave is scaled by what is left of the softmax beside them.

// out *= sigmoid(lse - sink), and probabilities; lse = ln(e^lse + e^sink). A block has one query of one head, as in attention.
KERNEL(attention_sinks, const float* flag, View sinks, View out, float* lse, float* probabilities, Shape s) {
    if (skipped(flag)) return;
    u32 length = (u32)s.q_len, heads = (u32)s.heads;
    u64 i = blockIdx.x % length, head = blockIdx.x / length % heads, batch = blockIdx.x / length / heads;
    u64 row = (batch * s.heads + head) * s.q_len + i, place = ((batch * s.q_len + i) * s.heads + head) * s.head_dim;
    float before = lse[row], sink = load_float(sinks, head);
    float factor = 1.0f / (1.0f + expf(sink - before));
    // Every thread has read what the first one changes.
    __syncthreads();
    EACH_OF_BLOCK(d, s.head_dim) store(out, place + d, load_float(out, place + d) * factor);
    if (probabilities) {
        EACH_OF_BLOCK(key, s.kv_len) probabilities[row * s.kv_len + key] *= factor;
    }
    if (threadIdx.x == 0) {
        bool higher = sink > before;
        lse[row] = (higher ? sink : before) + log1pf(expf(higher ? before - sink : sink - before));
    }
}

// dsinks (+)= -sum over the queries of e^(sink - lse) * (dout . out). A block has one head.
KERNEL(attention_sinks_backward, const float* flag, View sinks, View out, const float* lse, View dout, View dsinks, u32 accumulate,
       Shape s) {
    SHARED(double, scratch);
    if (skipped(flag)) return;
    u64 head = blockIdx.x;
    float sink = load_float(sinks, head);
    double sum = 0.0;
    EACH_OF_BLOCK(query, s.batch * s.q_len) {
        u64 batch = query / s.q_len, row = (batch * s.heads + head) * s.q_len + query % s.q_len;
        u64 place = (query * s.heads + head) * s.head_dim;
        float product = 0.0f;
        for (u64 d = 0; d < s.head_dim; d++) product += load_float(dout, place + d) * load_float(out, place + d);
        sum -= (double)(expf(sink - lse[row]) * product);
    }
    sum = block_sum(sum, scratch);
    if (threadIdx.x == 0) store(dsinks, head, (float)(accumulate ? load_float(dsinks, head) + sum : sum));
}
