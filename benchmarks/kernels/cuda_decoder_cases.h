// SPDX-License-Identifier: Apache-2.0
//
// Every kernel of module "decoder" against a straightforward computation in float64, over ragged shapes: one header for each kind
// of kernel. Outputs start as NaN, and so does what no kernel may read.
#pragma once

#include "cuda_decoder_attention_cases.h"
#include "cuda_decoder_recurrence_cases.h"
#include "cuda_decoder_rows_cases.h"
