#pragma once

#define CUDART_INF_F INFINITY
#define CUDART_NAN_F NAN
