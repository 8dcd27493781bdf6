"""What the reference model was trained on; `chats` generates the chats."""
