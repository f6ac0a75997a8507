# SPDX-License-Identifier: Apache-2.0
# Which libraries of others the bridges are built for. A bridge that is left out still has its headers and its object, whose
# factory answers `unsupported` with the reason. Nothing here is linked: cuBLASLt and NCCL are loaded at run time, CUTLASS and
# FlashInfer are headers, brought by scripts/fetch_headers.
#   METRALE_WITH_CUBLASLT    needs cublasLt.h beside cuda.h
#   METRALE_WITH_NCCL        needs nccl.h; METRALE_NCCL_INCLUDE_DIR is its folder
#   METRALE_CUTLASS_ROOT     folder with include/cutlass/cutlass.h; empty: no bridge
#   METRALE_BRIDGE_TARGETS   of METRALE_CUDA_TARGETS, what CUTLASS and FlashInfer are compiled for; all by default
#   METRALE_FLASHINFER_ROOT  folder with include/flashinfer/; empty: no bridge
set(METRALE_BRIDGE_TARGETS "${METRALE_CUDA_TARGETS}" CACHE STRING "What the CUTLASS and FlashInfer bridges are compiled for")
set(metrale_third_party ${PROJECT_SOURCE_DIR}/build/third_party)
find_path(METRALE_NCCL_INCLUDE_DIR nccl.h HINTS ${METRALE_CUDA_INCLUDE_DIR} DOC "Folder of nccl.h")

# metrale_bridge(LABEL option|root probe): sets METRALE_HAS_<LABEL>, and says what is built.
function(metrale_bridge label value probe)
  set(has OFF)
  if(METRALE_WITH_CUDA AND value AND EXISTS ${probe})
    set(has ON)
  elseif(METRALE_WITH_CUDA AND value)
    message(FATAL_ERROR "The ${label} bridge is asked for, but there is no ${probe}")
  endif()
  string(TOUPPER ${label} name)
  set(METRALE_HAS_${name} ${has} PARENT_SCOPE)
  message(STATUS "${label} bridge: ${has}")
endfunction()

# metrale_default_root(variable probe default): `default` where the probe is in it and the compiler is there, otherwise empty.
function(metrale_default_root variable probe default)
  set(root "")
  if(EXISTS ${default}/${probe} AND METRALE_CUDA_KERNELS)
    set(root ${default})
  endif()
  set(${variable} "${root}" CACHE PATH "Folder with ${probe}; empty: build without that bridge")
endfunction()

set(metrale_has_header OFF)
if(EXISTS "${METRALE_CUDA_INCLUDE_DIR}/cublasLt.h" AND METRALE_WITH_CUDA)
  set(metrale_has_header ON)
endif()
option(METRALE_WITH_CUBLASLT "Build the cuBLASLt bridge" ${metrale_has_header})
metrale_bridge(cuBLASLt "${METRALE_WITH_CUBLASLT}" "${METRALE_CUDA_INCLUDE_DIR}/cublasLt.h")
set(metrale_has_header OFF)
if(METRALE_NCCL_INCLUDE_DIR AND METRALE_WITH_CUDA)
  set(metrale_has_header ON)
endif()
option(METRALE_WITH_NCCL "Build the NCCL bridge" ${metrale_has_header})
metrale_bridge(NCCL "${METRALE_WITH_NCCL}" "${METRALE_NCCL_INCLUDE_DIR}/nccl.h")
metrale_default_root(METRALE_CUTLASS_ROOT include/cutlass/cutlass.h ${metrale_third_party}/cutlass)
metrale_bridge(CUTLASS "${METRALE_CUTLASS_ROOT}" "${METRALE_CUTLASS_ROOT}/include/cutlass/cutlass.h")
metrale_default_root(METRALE_FLASHINFER_ROOT include/flashinfer/page.cuh ${metrale_third_party}/flashinfer)
metrale_bridge(FlashInfer "${METRALE_FLASHINFER_ROOT}" "${METRALE_FLASHINFER_ROOT}/include/flashinfer/page.cuh")

# metrale_nvcc_objects(target SOURCES … INCLUDES folders… FLAGS …): compiles sources with nvcc, host and device code, and puts the
# objects into `target`, a static library. The CUDA runtime that such code calls comes in statically. Compiled for what of
# METRALE_CUDA_TARGETS is named in `ARCHS` ("90a"), or all of them.
function(metrale_nvcc_objects target)
  cmake_parse_arguments(arg "" "" "SOURCES;INCLUDES;FLAGS;ARCHS" ${ARGN})
  set(codes "")
  foreach(built IN LISTS METRALE_BRIDGE_TARGETS)
    string(REGEX REPLACE "^sm_" "" arch ${built})
    string(REPLACE "common" "80" arch ${arch})
    if(NOT arg_ARCHS OR arch IN_LIST arg_ARCHS)
      list(APPEND codes -gencode=arch=compute_${arch},code=sm_${arch})
    endif()
  endforeach()
  if(NOT codes)
    message(FATAL_ERROR "${target}: METRALE_BRIDGE_TARGETS (${METRALE_BRIDGE_TARGETS}) has none of ${arg_ARCHS}")
  endif()
  set(flags -O3 -std=c++20 -DNDEBUG --expt-relaxed-constexpr -Xcompiler=-fPIC,-ffile-prefix-map=${PROJECT_SOURCE_DIR}/=
    -I${PROJECT_SOURCE_DIR}/include -I${PROJECT_SOURCE_DIR}/src)
  foreach(folder IN LISTS arg_INCLUDES)
    list(APPEND flags -isystem ${folder})
  endforeach()
  set(cached "")
  if(METRALE_CCACHE)
    set(cached ${CMAKE_COMMAND} -E env CCACHE_BASEDIR=${PROJECT_SOURCE_DIR} CCACHE_NOHASHDIR=1 ${METRALE_CCACHE})
  endif()
  foreach(source IN LISTS arg_SOURCES)
    cmake_path(ABSOLUTE_PATH source BASE_DIRECTORY ${CMAKE_CURRENT_SOURCE_DIR})
    cmake_path(GET source STEM stem)
    set(object ${CMAKE_CURRENT_BINARY_DIR}/${target}.${stem}.o)
    add_custom_command(OUTPUT ${object}
      COMMAND ${cached} ${METRALE_NVCC} -c ${source} -o ${object} -MD -MF ${object}.d -MT ${object} ${flags} ${codes} ${arg_FLAGS}
      DEPENDS ${source} DEPFILE ${object}.d
      COMMENT "Compiling ${stem}.cu for ${target}" VERBATIM)
    set_source_files_properties(${object} PROPERTIES EXTERNAL_OBJECT ON GENERATED ON)
    target_sources(${target} PRIVATE ${object})
  endforeach()
  target_link_libraries(${target} PUBLIC $<BUILD_INTERFACE:metrale_cudart> $<INSTALL_INTERFACE:metrale::cudart>)
endfunction()

# The CUDA runtime as an archive: it loads libcuda itself, and shares the device's primary context.
if(METRALE_HAS_CUTLASS OR METRALE_HAS_FLASHINFER)
  find_library(METRALE_CUDART libcudart_static.a HINTS ${metrale_cuda_roots} PATH_SUFFIXES lib64 lib targets/x86_64-linux/lib
    DOC "The CUDA runtime, static")
  if(NOT METRALE_CUDART)
    message(FATAL_ERROR "The CUTLASS and FlashInfer bridges need libcudart_static.a of the toolkit; set METRALE_CUDART to it, or "
      "METRALE_CUTLASS_ROOT and METRALE_FLASHINFER_ROOT to nothing")
  endif()
  get_filename_component(METRALE_CUDART_DIR ${METRALE_CUDART} DIRECTORY)
  add_library(metrale_cudart INTERFACE)
  target_link_libraries(metrale_cudart INTERFACE ${METRALE_CUDART} Threads::Threads ${CMAKE_DL_LIBS} rt)
endif()
