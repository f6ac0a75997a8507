# SPDX-License-Identifier: Apache-2.0
# cmake -D build=<build of metrale> -D work=<folder to use> -D generator=… -D compiler=… -P run.cmake
# Installs metrale from its build into a fresh prefix, then configures, builds and runs this project against the prefix alone.
set(source ${CMAKE_CURRENT_LIST_DIR})
file(REMOVE_RECURSE ${work})

function(run)
  execute_process(COMMAND ${ARGV} RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(NOT status EQUAL 0)
    list(JOIN ARGV " " command)
    message(FATAL_ERROR "${command}\n${output}")
  endif()
  set(output "${output}" PARENT_SCOPE)
endfunction()

run(${CMAKE_COMMAND} --install ${build} --prefix ${work}/prefix)
# The build tree must not be what makes it work: nothing but the prefix is given.
run(${CMAKE_COMMAND} -S ${source} -B ${work}/build -G ${generator} -D CMAKE_CXX_COMPILER=${compiler} -D CMAKE_BUILD_TYPE=Release
  -D CMAKE_PREFIX_PATH=${work}/prefix)
run(${CMAKE_COMMAND} --build ${work}/build)
run(${work}/build/uses_metrale)
message(STATUS "${output}")

file(GLOB_RECURSE targets ${work}/prefix/metrale-targets.cmake)
file(STRINGS ${targets} leaks REGEX "${build}/(src|cmake|include)")
if(leaks)
  message(FATAL_ERROR "the installed package names the build tree: ${leaks}")
endif()
