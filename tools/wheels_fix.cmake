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
