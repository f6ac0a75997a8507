# SPDX-License-Identifier: Apache-2.0
# What the build takes from a CUDA toolkit: headers for the backend, nvcc for its kernels. Nothing of it is linked, CMake's CUDA
# language stays off, and without a toolkit everything else builds.
#   METRALE_WITH_CUDA      the CUDA backend; needs cuda.h as of METRALE_CUDA_MINIMUM
#   METRALE_CUDA_KERNELS   its kernels; needs nvcc
#   METRALE_CUDA_TARGETS   what the kernels are compiled for, see kernels/cuda/README.md
set(METRALE_CUDA_MINIMUM 13000)  # as cuda.h counts: the first with the second form of cuMemcpyBatchAsync
set(metrale_cuda_roots ${CUDAToolkit_ROOT} $ENV{CUDAToolkit_ROOT} $ENV{CUDA_HOME} $ENV{CUDA_PATH} /usr/local/cuda /opt/cuda)
find_path(METRALE_CUDA_INCLUDE_DIR cuda.h HINTS ${metrale_cuda_roots} PATH_SUFFIXES include targets/x86_64-linux/include
  DOC "Folder of cuda.h")
find_program(METRALE_NVCC nvcc HINTS ${metrale_cuda_roots} PATH_SUFFIXES bin DOC "The CUDA compiler")

set(metrale_cuda_version 0)
if(METRALE_CUDA_INCLUDE_DIR)
  file(STRINGS ${METRALE_CUDA_INCLUDE_DIR}/cuda.h metrale_cuda_version REGEX "^#define CUDA_VERSION +[0-9]+")
  string(REGEX REPLACE "[^0-9]" "" metrale_cuda_version "${metrale_cuda_version}")
endif()
set(metrale_cuda_found OFF)
if(metrale_cuda_version GREATER_EQUAL METRALE_CUDA_MINIMUM)
  set(metrale_cuda_found ON)
  set(metrale_nvcc_found ${METRALE_NVCC})
endif()
option(METRALE_WITH_CUDA "Build the CUDA backend" ${metrale_cuda_found})

if(METRALE_WITH_CUDA AND NOT metrale_cuda_found)
  message(FATAL_ERROR "METRALE_WITH_CUDA is ON, but there is no cuda.h of version ${METRALE_CUDA_MINIMUM} or later "
    "(found: '${METRALE_CUDA_INCLUDE_DIR}', version ${metrale_cuda_version}). Set METRALE_CUDA_INCLUDE_DIR to its folder, "
    "or METRALE_WITH_CUDA to OFF.")
elseif(METRALE_WITH_CUDA)
  message(STATUS "CUDA backend: on, headers of ${METRALE_CUDA_INCLUDE_DIR} (${metrale_cuda_version})")
elseif(metrale_cuda_found)
  message(STATUS "CUDA backend: off (METRALE_WITH_CUDA)")
else()
  message(STATUS "CUDA backend: off, no cuda.h of version ${METRALE_CUDA_MINIMUM} or later; METRALE_CUDA_INCLUDE_DIR names its folder")
endif()

# metrale_use_cuda_headers(target): cuda.h for the sources of a target. Installed targets do not hand it on.
function(metrale_use_cuda_headers target)
  target_include_directories(${target} SYSTEM PRIVATE ${METRALE_CUDA_INCLUDE_DIR})
  target_compile_definitions(${target} PRIVATE METRALE_WITH_CUDA)
endfunction()
