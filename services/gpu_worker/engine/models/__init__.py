"""Model families: reading a folder, the trunk and its MTP head, the fingerprint of what they compute."""
