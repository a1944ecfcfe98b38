"""`stretto bench train`, `peers`, `overlap` and `parity`: whole training steps of a GPT on every grid."""
