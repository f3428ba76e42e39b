#include "cuda/launch.cuh"
