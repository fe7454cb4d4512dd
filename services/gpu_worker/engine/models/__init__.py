"""Model families: reading a folder, the trunk and its MTP head.

loader    a folder becomes a model           registry   which family reads it        family   what the engine asks of a model
checkpoint   its tensors, read once          tensors    names and shapes of a hybrid's
hybrid    gated delta net and attention      dense, dense_config   llama, qwen3, mistral, gemma3
rope      position tables                    random, random_dense   small models of random weights
"""
