# SPDX-License-Identifier: Apache-2.0
# For building against the ROS packages from PyPI; given to cmake as -DCMAKE_PROJECT_INCLUDE=<this file>.
# Their exported targets name include directories of the machine that built them (/opt/python/...), and cmake
# refuses a target whose include directory does not exist. This file removes such directories at the end of configuring.
function(drop_missing_include_directories)
  get_property(targets DIRECTORY PROPERTY IMPORTED_TARGETS)
  foreach(target IN LISTS targets)
    get_target_property(directories ${target} INTERFACE_INCLUDE_DIRECTORIES)
    if(NOT directories)
      continue()
    endif()
    set(present "")
    foreach(directory IN LISTS directories)
      if(directory MATCHES "^\\$<" OR EXISTS "${directory}")
        list(APPEND present "${directory}")
      endif()
    endforeach()
    set_property(TARGET ${target} PROPERTY INTERFACE_INCLUDE_DIRECTORIES "${present}")
  endforeach()
endfunction()
cmake_language(DEFER CALL drop_missing_include_directories)

# Compiles the generated C++ of each library in one piece: most of the work is the headers, which all its files
# include. Not the generated C, whose files define static names twice.
function(compile_generated_cpp_at_once)
  get_property(targets DIRECTORY PROPERTY BUILDSYSTEM_TARGETS)
  foreach(target IN LISTS targets)
    get_target_property(type ${target} TYPE)
    if(target MATCHES "__rosidl_typesupport_" AND type STREQUAL "SHARED_LIBRARY")
      set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 0)
    endif()
  endforeach()
endfunction()
cmake_language(DEFER CALL compile_generated_cpp_at_once)
