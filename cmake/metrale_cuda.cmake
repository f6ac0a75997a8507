# SPDX-License-Identifier: Apache-2.0
# What the build takes from a CUDA toolkit: headers for the backend, nvcc for its kernels. Nothing of it is linked, CMake's CUDA
# language stays off, and without a toolkit everything else builds.
#   METRALE_WITH_CUDA      the CUDA backend; needs cuda.h as of METRALE_CUDA_MINIMUM
#   METRALE_CUDA_KERNELS   its kernels; needs nvcc
#   METRALE_CUDA_TARGETS   what the kernels are compiled for, see kernels/cuda/README.md
set(METRALE_CUDA_MINIMUM 13000)  # as cuda.h counts: the first with the second form of cuMemcpyBatchAsync
set(metrale_cuda_roots ${CUDAToolkit_ROOT} $ENV{CUDAToolkit_ROOT} $ENV{CUDA_HOME} $ENV{CUDA_PATH} /usr/local/cuda)
find_path(METRALE_CUDA_INCLUDE_DIR cuda.h HINTS ${metrale_cuda_roots} PATH_SUFFIXES include targets/x86_64-linux/include
  DOC "Folder of cuda.h")
find_program(METRALE_NVCC nvcc HINTS ${metrale_cuda_roots} PATH_SUFFIXES bin DOC "The CUDA compiler")

set(metrale_cuda_version 0)
if(EXISTS "${METRALE_CUDA_INCLUDE_DIR}/cuda.h")
  file(STRINGS ${METRALE_CUDA_INCLUDE_DIR}/cuda.h metrale_cuda_version REGEX "^#define CUDA_VERSION +[0-9]+")
  string(REGEX REPLACE "[^0-9]" "" metrale_cuda_version "${metrale_cuda_version}")
endif()
set(metrale_cuda_found OFF)
set(METRALE_NVCC_USABLE OFF)
if(metrale_cuda_version GREATER_EQUAL METRALE_CUDA_MINIMUM)
  set(metrale_cuda_found ON)
  if(METRALE_NVCC)
    set(METRALE_NVCC_USABLE ON)
  endif()
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

# ---- kernels ----
# A module is one .cu, or one for some targets: kernels/cuda/README.md says how they are chosen. `common` is code for sm_80 with
# PTX of it, which the driver compiles for any later device.
option(METRALE_CUDA_KERNELS "Compile the kernels of the CUDA backend" ${METRALE_NVCC_USABLE})
set(METRALE_CUDA_TARGETS "common;sm_90a" CACHE STRING "What CUDA kernels are compiled for: common, sm_<number>[a|f]")
if(PROJECT_IS_TOP_LEVEL)
  set(metrale_cuda_cache ${PROJECT_SOURCE_DIR}/build/cuda-kernels)
else()
  set(metrale_cuda_cache ${PROJECT_BINARY_DIR}/cuda-kernels)
endif()
set(METRALE_CUDA_CACHE ${metrale_cuda_cache} CACHE PATH "Where compiled CUDA kernels are kept, for all builds of this checkout")

if(NOT METRALE_WITH_CUDA)
  set(METRALE_CUDA_KERNELS OFF)
elseif(METRALE_CUDA_KERNELS AND NOT METRALE_NVCC_USABLE)
  message(FATAL_ERROR "METRALE_CUDA_KERNELS is ON, but there is no nvcc. Set METRALE_NVCC to it, or METRALE_CUDA_KERNELS to OFF.")
elseif(METRALE_CUDA_KERNELS)
  foreach(target IN LISTS METRALE_CUDA_TARGETS)
    if(NOT target MATCHES "^(common|sm_[0-9]+[af]?)$")
      message(FATAL_ERROR "METRALE_CUDA_TARGETS: '${target}' is neither 'common' nor like 'sm_90a'")
    endif()
  endforeach()
  message(STATUS "CUDA kernels: ${METRALE_CUDA_TARGETS}, by ${METRALE_NVCC}")
else()
  message(STATUS "CUDA kernels: none, no nvcc or METRALE_CUDA_KERNELS is OFF")
endif()

# metrale_cuda_image(variable name COMMON source OVERLAYS target=source … INCLUDES folders…): the rules that make the fat binary of
# module `name`; its path goes into `variable`, or nothing where no source serves a target of this build. The target
# cuda_module_<name> builds it alone.
function(metrale_cuda_image variable name)
  cmake_parse_arguments(arg "" "COMMON" "OVERLAYS;INCLUDES" ${ARGN})
  set(folder ${CMAKE_CURRENT_BINARY_DIR}/cuda)
  file(MAKE_DIRECTORY ${folder})
  set(images "")
  set(parts "")
  foreach(target IN LISTS METRALE_CUDA_TARGETS)
    set(source ${arg_COMMON})
    foreach(overlay IN LISTS arg_OVERLAYS)
      if(overlay MATCHES "^${target}=(.+)$")
        set(source ${CMAKE_MATCH_1})
      endif()
    endforeach()
    if(NOT source)
      continue()
    endif()
    string(REGEX REPLACE "^sm_" "" arch ${target})
    string(REPLACE "common" "80" arch ${arch})
    set(output ${folder}/${name}.${target})
    add_custom_command(OUTPUT ${output}.cubin
      BYPRODUCTS ${output}.ptx ${output}.txt
      COMMAND ${CMAKE_COMMAND} -D source=${source} -D output=${output} -D arch=${arch} -D nvcc=${METRALE_NVCC}
        -D root=${PROJECT_SOURCE_DIR} -D "includes=${arg_INCLUDES}" -D cache=${METRALE_CUDA_CACHE}
        -D strict=${METRALE_WARNINGS_AS_ERRORS} -P ${PROJECT_SOURCE_DIR}/cmake/metrale_nvcc.cmake
      DEPENDS ${source} ${PROJECT_SOURCE_DIR}/cmake/metrale_nvcc.cmake
      DEPFILE ${output}.d
      COMMENT "Compiling CUDA module ${name} for ${target}"
      VERBATIM)
    list(APPEND parts ${output}.cubin)
    list(APPEND images --image3=kind=elf,sm=${arch},file=${output}.cubin)
    if(target STREQUAL "common")
      list(APPEND images --image3=kind=ptx,sm=${arch},file=${output}.ptx)
    endif()
  endforeach()
  set(${variable} "" PARENT_SCOPE)
  if(images)
    set(image ${folder}/${name}.fatbin)
    cmake_path(GET METRALE_NVCC PARENT_PATH toolkit)
    add_custom_command(OUTPUT ${image}
      COMMAND ${toolkit}/fatbinary -64 --compress-all --compress-mode=size --create=${image} ${images}
      DEPENDS ${parts}
      COMMENT "Joining CUDA module ${name}"
      VERBATIM)
    add_custom_target(cuda_module_${name} DEPENDS ${image})
    set(${variable} ${image} PARENT_SCOPE)
  endif()
endfunction()

# metrale_embed_cuda(target FUNCTION qualified::name HEADER its/header.h IMAGES name=path …): gives `target` the definition of
# `std::span<const metrale::cuda::ModuleImage> qualified::name()`, with those modules in the program.
function(metrale_embed_cuda target)
  cmake_parse_arguments(arg "" "FUNCTION;HEADER" "IMAGES" ${ARGN})
  list(SORT arg_IMAGES)
  string(REPLACE "::" "_" prefix ${arg_FUNCTION})
  set(assembly "")
  set(symbols "")
  set(rows "")
  set(files "")
  foreach(image IN LISTS arg_IMAGES)
    string(REGEX MATCH "^([^=]+)=(.+)$" image ${image})
    set(name ${CMAKE_MATCH_1})
    set(file ${CMAKE_MATCH_2})
    set(symbol ${prefix}_${name})
    string(APPEND assembly "  .balign 64\n${symbol}_begin:\n  .incbin \"${file}\"\n${symbol}_end:\n")
    string(APPEND symbols "extern \"C\" const std::byte ${symbol}_begin[];\nextern \"C\" const std::byte ${symbol}_end[];\n")
    string(APPEND rows "    metrale::cuda::ModuleImage{\"${name}\", {${symbol}_begin, ${symbol}_end}},\n")
    list(APPEND files ${file})
  endforeach()
  list(LENGTH arg_IMAGES count)
  set(source ${CMAKE_CURRENT_BINARY_DIR}/${prefix}.cpp)
  file(CONFIGURE OUTPUT ${source} @ONLY NEWLINE_STYLE UNIX CONTENT [[
// SPDX-License-Identifier: Apache-2.0
// Written by the build.
#include <array>
#include <cstddef>
#include <span>

#include "@arg_HEADER@"

asm(R"(
  .section .rodata
@assembly@  .text
)");
@symbols@
std::span<const metrale::cuda::ModuleImage> @arg_FUNCTION@() {
  static const std::array<metrale::cuda::ModuleImage, @count@> modules{
@rows@  };
  return modules;
}
]])
  target_sources(${target} PRIVATE ${source})
  set_source_files_properties(${source} PROPERTIES OBJECT_DEPENDS "${files}")
endfunction()

# ---- programs for a machine with a device ----
# metrale_gpu_program(target): one of the programs that scripts/gpu_check.sh runs.
function(metrale_gpu_program target)
  set_property(GLOBAL APPEND PROPERTY METRALE_GPU_PROGRAMS ${target})
endfunction()

# The target gpu_programs: builds them and lays them together in <build>/gpu. Called once all programs are known.
function(metrale_collect_gpu_programs)
  get_property(programs GLOBAL PROPERTY METRALE_GPU_PROGRAMS)
  set(folder ${PROJECT_BINARY_DIR}/gpu)
  set(copies "")
  foreach(program IN LISTS programs)
    list(APPEND copies COMMAND ${CMAKE_COMMAND} -E copy_if_different $<TARGET_FILE:${program}> ${folder}/)
  endforeach()
  add_custom_target(gpu_programs COMMAND ${CMAKE_COMMAND} -E make_directory ${folder} ${copies}
    COMMENT "Collecting the programs for a machine with a device" VERBATIM)
  if(programs)
    add_dependencies(gpu_programs ${programs})
  endif()
endfunction()
