// The same measurement as bench/restart.py with libllama: the functions that llama-server's slot save and restore call.
//
//   g++ -O2 -std=c++17 -I LLAMA/include -I LLAMA/ggml/include bench/restart_llamacpp.cpp -L LLAMA/build/bin -lllama -lggml \
//       -lggml-base -Wl,-rpath,LLAMA/build/bin -o restart_llamacpp
//   python bench/restart.py --ids MODEL > ids           history and question as token ids, two lines
//   restart_llamacpp MODEL.gguf ids FILE compute|save|load THREADS
//
// Prints one JSON object: seconds to the logits of the first new token (load: with reading the file), and the token.

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "llama.h"

static std::vector<llama_token> line(std::ifstream &in) {
    std::string text;
    std::getline(in, text);
    std::istringstream words(text);
    std::vector<llama_token> found;
    for (llama_token token; words >> token;) found.push_back(token);
    return found;
}

static void compute(llama_context *ctx, std::vector<llama_token> tokens) {
    const int most = int(llama_n_batch(ctx));
    for (size_t at = 0; at < tokens.size(); at += most) {
        const int n = int(std::min(tokens.size() - at, size_t(most)));
        if (llama_decode(ctx, llama_batch_get_one(tokens.data() + at, n)) != 0) exit(3);
    }
    llama_synchronize(ctx);
}

int main(int argc, char **argv) {
    if (argc != 6) return 2;
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    llama_backend_init();
    std::ifstream in(argv[2]);
    const std::vector<llama_token> history = line(in), question = line(in);
    llama_model_params of_model = llama_model_default_params();
    llama_model *model = llama_model_load_from_file(argv[1], of_model);
    llama_context_params params = llama_context_default_params();
    params.n_ctx = 4096;
    params.n_threads = params.n_threads_batch = atoi(argv[5]);
    llama_context *ctx = model ? llama_init_from_model(model, params) : nullptr;
    if (!ctx) return 4;
    const std::string mode = argv[4];
    compute(ctx, {question[0]});  // the first call allocates
    llama_memory_clear(llama_get_memory(ctx), true);
    const auto start = std::chrono::steady_clock::now();
    size_t nbytes = 0;
    if (mode == "load") {
        std::vector<llama_token> held(history.size());
        size_t n = 0;
        nbytes = llama_state_seq_load_file(ctx, argv[3], 0, held.data(), held.size(), &n);
        if (!nbytes || held != history) return 5;
    } else {
        compute(ctx, history);
    }
    if (mode == "save") {
        nbytes = llama_state_seq_save_file(ctx, argv[3], 0, history.data(), history.size());
    } else {
        compute(ctx, question);
    }
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    int best = 0;
    if (mode != "save") {
        const float *logits = llama_get_logits_ith(ctx, -1);
        const int n = llama_vocab_n_tokens(llama_model_get_vocab(model));
        for (int i = 1; i < n; i++) best = logits[i] > logits[best] ? i : best;
    }
    printf("{\"mode\": \"%s\", \"seconds\": %.4f, \"bytes\": %zu, \"token\": %d}\n", mode.c_str(), seconds.count(), nbytes, best);
}
