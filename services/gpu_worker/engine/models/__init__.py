"""Model families: reading a folder, the trunk and its MTP head.

loader    a folder becomes a model           registry   which family reads it        family   what the engine asks of a model
checkpoint   its tensors, read in turn       quantised  float8 scales                placed   weights on their way to a device
fields   of a config, with their names in faults               kinds   of values that they may hold
hybrid, hybrid_config, tensors   gated delta net and attention (qwen3_5)     qwen3_next   its projections, interleaved
latent, latent_config, latent_tensors    latent attention (glm, deepseek)    expert_tensors   experts stored one by one
dense, dense_config      llama, qwen3 (dense, moe), mistral, gemma3   rope             position tables
block, block_config, block_tensors, block_heads, block_walk, block_context, block_ring, block_pass, block_loader    block
                         drafters: layers, fields and maths, names, what rows propose, to the host and on a card, the rows that
                         they read, where these lie, one pass, folders
random, random_dense, random_next, random_latent, random_block   small models of random weights
"""
